#include "plumb/analysis/report_assets.h"

namespace plumb {

std::string_view report_style() {
  return R"css(
:root { --ground:#ffffff; --soft:#f8fafc; --line:#e2e8f0; --axis:#94a3b8; --text:#1e293b; --muted:#64748b; --accent:#2563eb;
  --band-normal:#dcfce7; --band-sub:#fef3c7; --band-lost:#fee2e2; --hover:rgba(37,99,235,.10); --bad:#dc2626;
  --c0:#2563eb; --c1:#ea580c; --c2:#16a34a; --c3:#9333ea; --c4:#0891b2; --c5:#db2777; --c6:#a16207; --c7:#475569; color-scheme:light; }
@media (prefers-color-scheme:dark) { :root:not([data-theme=light]) {
  --ground:#0f172a; --soft:#172135; --line:#2a3a52; --axis:#64748b; --text:#e2e8f0; --muted:#94a3b8; --accent:#7aa7ff;
  --band-normal:#12302a; --band-sub:#383016; --band-lost:#3a1e2a; --hover:rgba(122,167,255,.16); --bad:#f87171;
  --c0:#60a5fa; --c1:#fb923c; --c2:#4ade80; --c3:#c084fc; --c4:#22d3ee; --c5:#f472b6; --c6:#facc15; --c7:#a8b5c8; color-scheme:dark; } }
:root[data-theme=dark] {
  --ground:#0f172a; --soft:#172135; --line:#2a3a52; --axis:#64748b; --text:#e2e8f0; --muted:#94a3b8; --accent:#7aa7ff;
  --band-normal:#12302a; --band-sub:#383016; --band-lost:#3a1e2a; --hover:rgba(122,167,255,.16); --bad:#f87171;
  --c0:#60a5fa; --c1:#fb923c; --c2:#4ade80; --c3:#c084fc; --c4:#22d3ee; --c5:#f472b6; --c6:#facc15; --c7:#a8b5c8; color-scheme:dark; }
* { box-sizing:border-box; }
html { scroll-behavior:smooth; }
body { margin:0 auto; padding:28px 32px 80px; max-width:1264px; background:var(--ground); color:var(--text);
  font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif; }
header { border-bottom:1px solid var(--line); margin-bottom:24px; padding-bottom:14px; }
h1 { font-size:28px; line-height:1.2; margin:0; letter-spacing:-.02em; }
h2 { font-size:20px; margin:40px 0 10px; letter-spacing:-.01em; }
h3 { font-size:15px; margin:0 0 6px; }
p { max-width:78ch; margin:8px 0 12px; }
ul { max-width:78ch; margin:8px 0 12px; padding-left:22px; }
.subtitle { color:var(--muted); margin:6px 0 0; }
nav { margin-top:12px; display:flex; flex-wrap:wrap; gap:4px 18px; font-size:14px; }
a { color:var(--accent); text-decoration:none; }
a:hover { text-decoration:underline; }
#theme { float:right; border:1px solid var(--line); background:var(--soft); color:var(--text); border-radius:8px; width:34px; height:34px;
  font-size:16px; cursor:pointer; }
code { font:0.9em ui-monospace,Menlo,Consolas,monospace; background:var(--soft); border:1px solid var(--line); border-radius:4px; padding:0 4px; }
pre { font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace; background:var(--soft); border:1px solid var(--line); border-radius:8px;
  padding:12px 14px; overflow:auto; max-height:520px; }
.figures { display:grid; grid-template-columns:repeat(auto-fit,minmax(180px,1fr)); gap:12px; margin:16px 0 20px; }
.tile { background:var(--soft); border:1px solid var(--line); border-radius:10px; padding:12px 16px; }
.tile .label { color:var(--muted); font-size:13px; }
.tile .value { font-size:26px; font-weight:650; letter-spacing:-.02em; font-variant-numeric:tabular-nums; }
.tile .note { color:var(--muted); font-size:12.5px; }
figure { margin:18px 0 26px; border:1px solid var(--line); border-radius:10px; padding:16px 18px; }
figure svg { display:block; }
.line-chart svg { max-width:100%; height:auto; overflow:visible; }
.wide { overflow-x:auto; }
table { border-collapse:collapse; margin:12px 0 18px; font-size:14px; font-variant-numeric:tabular-nums; }
caption { text-align:left; color:var(--muted); padding-bottom:6px; }
th, td { padding:5px 14px 5px 10px; border-bottom:1px solid var(--line); text-align:left; white-space:nowrap; }
th { padding:0; background:var(--soft); }
th button { all:unset; box-sizing:border-box; width:100%; cursor:pointer; padding:6px 14px 6px 10px; font-weight:600; }
th button:focus-visible { outline:2px solid var(--accent); }
th button::after { content:"\2195"; opacity:.3; padding-left:6px; font-size:11px; }
th[aria-sort=ascending] button::after { content:"\2191"; opacity:1; }
button.more { font:inherit; padding:5px 12px; border:1px solid var(--line); border-radius:7px; background:var(--soft); color:var(--text); cursor:pointer; }
th[aria-sort=descending] button::after { content:"\2193"; opacity:1; }
.number { text-align:right; }
td:empty::after { content:"\00a0"; }
tbody tr:hover { background:var(--hover); }
.s0 { --c:var(--c0); } .s1 { --c:var(--c1); } .s2 { --c:var(--c2); } .s3 { --c:var(--c3); }
.s4 { --c:var(--c4); } .s5 { --c:var(--c5); } .s6 { --c:var(--c6); } .s7 { --c:var(--c7); }
svg .text { fill:var(--text); } svg .muted { fill:var(--muted); } svg .grid { stroke:var(--line); } svg .axis { stroke:var(--axis); }
svg .line { stroke:var(--c); } svg .area { fill:var(--c); } svg .bad { stroke:var(--bad); fill:none; }
svg .band-normal { fill:var(--band-normal); } svg .band-sub { fill:var(--band-sub); } svg .band-lost { fill:var(--band-lost); }
svg .band-none { fill:var(--soft); } svg .one { stroke:var(--muted); } svg .lane { fill:var(--soft); }
.legend { cursor:pointer; } .legend.off { opacity:.35; } .curve.off { display:none; }
.cursor { stroke:var(--axis); stroke-dasharray:3 3; pointer-events:none; }
.key { color:var(--muted); font-size:13px; margin:0 0 8px; max-width:none; }
.key span { display:inline-block; vertical-align:middle; margin:0 3px 0 12px; background:var(--c0); }
.key span:first-child { margin-left:0; }
.mark-std { width:8px; height:8px; border-radius:4px; } .mark-mean { width:2px; height:11px; } .mark-bar { width:24px; height:5px; opacity:.35; }
.mark-range { width:24px; height:1px; opacity:.6; }
.key .swatch { width:14px; height:12px; border:1px solid var(--line); }
.key .band-normal { background:var(--band-normal); } .key .band-sub { background:var(--band-sub); } .key .band-lost { background:var(--band-lost); }
.tools { display:flex; flex-wrap:wrap; gap:6px 18px; align-items:center; font-size:13px; margin-bottom:6px; }
.tools input[type=search] { font:inherit; padding:5px 10px; border:1px solid var(--line); border-radius:7px; background:var(--soft); color:var(--text);
  width:270px; }
.count { color:var(--muted); }
.scroll { max-height:720px; overflow:auto; border-bottom:1px solid var(--line); }
.scale-head { position:sticky; top:0; background:var(--ground); z-index:1; width:max-content; }
.row { cursor:pointer; } .row:hover .hit, .row.chosen .hit { fill:var(--hover); }
.detail { margin-top:14px; font-size:13px; }
.detail h4 { margin:0 0 8px; font-size:14px; }
.detail .panels { display:flex; flex-wrap:wrap; gap:20px; }
.detail table { font-size:13px; margin:6px 0; }
#tip { position:fixed; pointer-events:none; white-space:pre; background:var(--ground); color:var(--text); border:1px solid var(--axis);
  border-radius:7px; padding:7px 10px; font:12px/1.45 ui-monospace,Menlo,Consolas,monospace; box-shadow:0 4px 16px rgba(0,0,0,.18); z-index:9;
  max-width:94vw; overflow:hidden; }
@media print { #theme, .tools, nav { display:none; } .scroll { max-height:none; } }
@media (max-width:700px) { body { padding:16px 14px 40px; } figure { padding:10px; } }
)css";
}

std::string_view report_script() {
  return R"js("use strict";
window.addEventListener("error", e => { document.body.dataset.error = e.message; });
(() => {
const SVG = "http://www.w3.org/2000/svg";
const all = (selector, of = document) => [...of.querySelectorAll(selector)];
const make = (name, attributes = {}, of = null) => {
  const element = document.createElementNS(SVG, name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (of) of.append(element);
  return element;
};
const html = (name, text = "", of = null) => {
  const element = document.createElement(name);
  element.textContent = text;
  if (of) of.append(element);
  return element;
};
const short = v => v === null || v === undefined ? "-" : v === 0 ? "0" : Math.abs(v) >= 1e-3 && Math.abs(v) < 1e6
  ? String(+v.toPrecision(4)) : v.toExponential(2);
const share = v => v === undefined || v === null ? "-" : (100 * v).toFixed(v && v < 0.001 ? 3 : 1) + "%";
const data = figure => JSON.parse(figure.querySelector("script").textContent);

// Tool tips: <title> elements, shown at once and in full.
const tip = document.getElementById("tip");
const show = (text, x, y) => {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, x + 16 + box.width > innerWidth ? x - 12 - box.width : x + 16) + "px";
  tip.style.top = Math.max(4, y + 18 + box.height > innerHeight ? y - 12 - box.height : y + 18) + "px";
};
const told = new WeakMap();
document.addEventListener("mousemove", e => {
  let text = null;
  for (let at = e.target; at && at.closest && at !== document.body && at.tagName !== "svg"; at = at.parentNode) {
    const title = [...at.children].find(child => child.tagName === "title");
    if (title) { told.set(at, title.textContent); title.remove(); }
    if (told.has(at)) { text = told.get(at); break; }
  }
  if (text !== null) show(text, e.clientX, e.clientY);
  else if (!(e.target.closest && e.target.closest(".line-chart svg"))) tip.hidden = true;
});

const root = document.documentElement;
document.getElementById("theme").onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme:dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
};

// Tables: a click sorts, a second one the other way round. Of a long one only the first rows are laid out until all are
// asked for: laying out thousands takes seconds.
const names = new Intl.Collator(undefined, {numeric: true});
const MOST = 200;
for (const table of all("table")) {
  const body = table.tBodies[0], rows = [...body.rows];
  let more = null;
  const lay = () => body.replaceChildren(...(more ? rows.slice(0, MOST) : rows));
  if (rows.length > MOST + 50) {
    more = html("button", `all ${rows.length} rows`, null);
    more.type = "button";
    more.className = "more";
    more.onclick = () => { more.remove(); more = null; lay(); };
    table.after(more);
    lay();
  }
  all("th", table).forEach((head, column) => {
    head.firstChild.onclick = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      all("th", table).forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const numeric = head.classList.contains("number");
      const keys = new Map(rows.map(row => {
        const text = row.cells[column].textContent.trim();
        return [row, numeric ? parseFloat(text) : text];
      }));
      // What is no number goes last either way.
      rows.sort((one, other) => {
        const a = keys.get(one), b = keys.get(other);
        return numeric ? (isNaN(a) || isNaN(b) ? isNaN(a) - isNaN(b) : down ? b - a : a - b) : (down ? -1 : 1) * names.compare(a, b);
      });
      lay();
    };
  });
}

for (const figure of all(".line-chart")) {
  const d = data(figure), svg = figure.querySelector("svg");
  const off = new Set();
  for (const item of all(".legend", figure)) {
    item.onclick = () => {
      const i = +item.dataset.curve;
      off.has(i) ? off.delete(i) : off.add(i);
      for (const part of all(`[data-curve="${i}"]`, figure)) part.classList.toggle("off", off.has(i));
    };
  }
  const cursor = make("line", {class: "cursor", y1: d.top, y2: d.top + d.height, visibility: "hidden"}, svg);
  const dots = d.curves.map((_, i) => {
    const group = make("g", {class: "s" + i % 8, "pointer-events": "none"}, svg);
    return make("circle", {class: "area", r: 3.5, visibility: "hidden"}, group);
  });
  const hide = () => { [cursor, ...dots].forEach(m => m.setAttribute("visibility", "hidden")); tip.hidden = true; };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) { const mid = low + high >> 1; xs[mid] < x ? low = mid + 1 : high = mid; }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };
  svg.addEventListener("mouseleave", hide);
  svg.addEventListener("mousemove", e => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const px = (e.clientX - box.left) * scale, py = (e.clientY - box.top) * scale;
    if (px < d.left || px > d.left + d.width || py < d.top || py > d.top + d.height) return hide();
    const x = d.x0 + (px - d.left) / d.width * (d.x1 - d.x0);
    const found = [];
    d.curves.forEach((curve, i) => {
      dots[i].setAttribute("visibility", "hidden");
      if (off.has(i) || !curve.x.length) return;
      const k = nearest(curve.x, x), at = d.left + (curve.x[k] - d.x0) / (d.x1 - d.x0) * d.width;
      // A curve that ends before has nothing to say here.
      if (Math.abs(at - px) > 12 && Math.abs(curve.x[k] - x) > (d.x1 - d.x0) / 50) return;
      found.push([curve.y[k], curve.name, curve.x[k]]);
      if (curve.y[k] === null) return;
      const y = d.log ? Math.log10(curve.y[k]) : curve.y[k];
      const cy = d.top + d.height - (y - d.y0) / (d.y1 - d.y0) * d.height;
      if (cy < d.top || cy > d.top + d.height) return;
      dots[i].setAttribute("cx", at);
      dots[i].setAttribute("cy", cy);
      dots[i].setAttribute("visibility", "visible");
    });
    if (!found.length) return hide();
    found.sort((a, b) => (b[0] === null ? Infinity : b[0]) - (a[0] === null ? Infinity : a[0]) || 0);
    cursor.setAttribute("x1", px);
    cursor.setAttribute("x2", px);
    cursor.setAttribute("visibility", "visible");
    const width = Math.max(...found.map(f => (f[0] === null ? "not finite" : short(f[0])).length));
    show(`${d.x_label} ${short(found[0][2])}\n` +
      found.map(f => `${(f[0] === null ? "not finite" : short(f[0])).padStart(width)}  ${f[1]}`).join("\n"), e.clientX, e.clientY);
  });
}

const histogram = (d, row, key) => {
  const found = row.of.map((s, v) => ({v, s: s && s[key]})).filter(one => one.s && one.s.exponents);
  if (!found.length) return null;
  const band = d[key + "_band"];
  let low = Infinity, high = -Infinity, top = 0;
  for (const {s} of found) for (const [e, n] of s.exponents) {
    if (e <= -127 || e >= 128 || !n) continue;
    low = Math.min(low, e); high = Math.max(high, e); top = Math.max(top, n / s.numel);
  }
  if (low > high) return null;
  if (band) { low = Math.min(low, Math.floor(Math.log2(band.sub)) - 1); high = Math.max(high, Math.ceil(Math.log2(band.max))); }
  const W = 540, H = 180, left = 42, base = H - 30, wide = W - left - 8, step = wide / (high + 1 - low);
  const x = e => left + Math.max(0, Math.min(wide, (e - low) * step)), y = p => base - p / top * (base - 14);
  const svg = make("svg", {width: W, height: H, viewBox: `0 0 ${W} ${H}`, "font-size": 11});
  const area = (a, b, kind) => b > a && make("rect", {class: kind, x: a, y: 10, width: b - a, height: base - 10}, svg);
  if (band) {
    const [a, b, c] = [band.sub, band.normal, band.max].map(v => x(Math.log2(v)));
    area(left, a, "band-lost"); area(a, b, "band-sub"); area(b, c, "band-normal"); area(c, left + wide, "band-lost");
  } else area(left, left + wide, "band-none");
  for (let e = Math.ceil(low / 4) * 4; e <= high + 1; e += 4) {
    const label = make("text", {class: "muted", x: x(e), y: base + 15, "text-anchor": "middle"}, svg);
    label.textContent = "2";
    const power = make("tspan", {dy: -4, "font-size": 8}, label);
    power.textContent = e;
  }
  for (const p of [top / 2, top]) {
    const label = make("text", {class: "muted", x: left - 5, y: y(p) + 4, "text-anchor": "end"}, svg);
    label.textContent = share(p);
  }
  const bar = step / found.length;
  found.forEach(({v, s}, i) => {
    const group = make("g", {class: "s" + v % 8}, svg);
    for (const [e, n] of s.exponents) {
      if (e <= -127 || e >= 128 || !n) continue;
      const rect = make("rect", {class: "area", x: x(e) + i * bar + bar * .08, width: bar * .84, y: y(n / s.numel),
        height: base - y(n / s.numel), opacity: .85}, group);
      make("title", {}, rect).textContent = `${d.variants[v]}\n2^${e} <= |x| < 2^${e + 1}: ${share(n / s.numel)} (${n} of ${s.numel})`;
    }
  });
  make("line", {class: "axis", x1: left, x2: left + wide, y1: base, y2: base}, svg);
  return svg;
};

for (const figure of all(".scale-chart")) {
  const d = data(figure), body = figure.querySelector(".scale-body"), svg = body.querySelector("svg");
  const height = +body.dataset.rowHeight, rows = all(".row", svg), detail = figure.querySelector(".detail");
  const search = figure.querySelector("input[type=search]"), lossy = figure.querySelector("input[type=checkbox]");
  const texts = d.rows.map(r => [r.module, r.name, ...r.of.map(s => s ? s.op : "")].join(" ").toLowerCase());
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(w => w);
    let shown = 0;
    rows.forEach((row, i) => {
      const fits = words.every(w => texts[i].includes(w)) && (!lossy.checked || row.dataset.lost);
      row.style.display = fits ? "" : "none";
      if (fits) row.setAttribute("transform", `translate(0 ${shown++ * height})`);
    });
    const total = Math.max(1, shown * height);
    svg.setAttribute("height", total);
    svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${total}`);
    for (const part of all(".tall", svg)) {
      if (part.tagName === "rect") part.setAttribute("height", total); else part.setAttribute("y2", total);
    }
    figure.querySelector(".count").textContent = shown === rows.length ? `${shown} tensors` : `${shown} of ${rows.length} tensors`;
  };
  search.oninput = lossy.onchange = filter;
  filter();
  const facts = [["std", s => short(s.std)], ["mean |x|", s => short(s.mean_abs)], ["max |x|", s => short(s.abs_max)],
    ["min |x|", s => short(s.abs_min)], ["elements", s => s.numel], ["zero", s => s.zero], ["becomes 0", s => share(s.underflow)],
    ["loses digits", s => share(s.subnormal)], ["too large", s => share(s.overflow)], ["NaN, inf", s => s.nan + s.inf]];
  const choose = i => {
    const row = d.rows[i];
    rows.forEach((r, k) => r.classList.toggle("chosen", k === i));
    detail.replaceChildren();
    detail.hidden = false;
    html("h4", (row.module ? row.module + "  " : "") + row.name, detail);
    const table = html("table", "", detail), head = html("tr", "", html("thead", "", table)), lines = html("tbody", "", table);
    for (const name of ["", "", "operator", ...facts.map(f => f[0])]) {
      const cell = html("th", "", head);
      cell.style.padding = "4px 10px";
      cell.textContent = name;
    }
    row.of.forEach((s, v) => {
      for (const [key, word] of [["fwd", "values"], ["bwd", "gradients"]]) {
        if (!s || !s[key]) continue;
        const line = html("tr", "", lines);
        for (const text of [d.variants[v], word, s.op, ...facts.map(f => f[1](s[key]))]) html("td", text, line);
      }
    });
    const panels = html("div", "", detail);
    panels.className = "panels";
    for (const [key, word] of [["fwd", "Values"], ["bwd", "Gradients"]]) {
      const picture = histogram(d, row, key);
      if (!picture) continue;
      const panel = html("div", "", panels), band = d[key + "_band"];
      html("div", word + ": share of elements by power of two" + (band ? ", against " + band.name : ""), panel);
      panel.append(picture);
    }
  };
  rows.forEach((row, i) => row.addEventListener("click", () => choose(i)));
  // The first row with histograms lies open, so that one sees that there are some.
  const open = d.rows.findIndex(r => r.of.some(s => s && ["fwd", "bwd"].some(k => s[k] && s[k].exponents)));
  if (open >= 0) choose(open);
}
)js";
}

std::string_view report_script_end() {
  return R"js(
document.body.dataset.ready = "1";
})();
)js";
}

}  // namespace plumb

// The style and the script of history_view.h's figures.
#include "plumb/analysis/report_assets.h"

namespace plumb {

std::string_view history_style() {
  return R"css(
.stepper input { width:260px; vertical-align:middle; accent-color:var(--accent); }
.stepper output { display:inline-block; min-width:6ch; font-variant-numeric:tabular-nums; font-weight:600; }
.tools select { font:inherit; padding:4px 6px; border:1px solid var(--line); border-radius:7px; background:var(--soft); color:var(--text); }
.history-view { overflow-x:auto; }
.history-head { position:relative; height:46px; width:1136px; }
.history-head button { all:unset; position:absolute; top:0; cursor:pointer; font-size:12.5px; font-weight:600; white-space:nowrap; }
.history-head button.right { text-align:right; }
.history-head button:focus-visible { outline:2px solid var(--accent); }
.history-head button[aria-sort=ascending]::after { content:" \2191"; }
.history-head button[aria-sort=descending]::after { content:" \2193"; }
.history-head svg { position:absolute; left:0; bottom:0; }
.history-scroll { max-height:640px; overflow-y:auto; width:1152px; border-bottom:1px solid var(--line); }
.history-space { position:relative; width:1136px; }
.history-space svg { position:absolute; left:0; }
.history-view .detail .panels > div { max-width:560px; }
)css";
}

std::string_view history_script() {
  return R"js(
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer;
const lg = v => v > 0 && isFinite(v) ? Math.log2(v) : null;

for (const figure of all(".history-view")) {
  const d = data(figure), N = d.tensors.length, F = d.formats.length, K = 6 + 3 * F, B = d.bins;
  for (const run of d.runs) {
    run.numbers = new Float32Array(bytes(run.numbers));
    run.shares = new Uint16Array(bytes(run.shares));
  }
  const steps = [...new Set(d.runs.flatMap(run => run.steps))].sort((a, b) => a - b);
  const keys = ["fwd", "bwd"], R = d.runs.length, rowHeight = R > 1 ? 27 : 17;
  const slider = figure.querySelector("input[type=range]"), output = figure.querySelector("output");
  const search = figure.querySelector("input[type=search]"), lossy = figure.querySelector("input[type=checkbox]");
  const scroll = figure.querySelector(".history-scroll"), space = figure.querySelector(".history-space");
  const head = figure.querySelector(".history-head"), detail = figure.querySelector(".detail");
  const selects = keys.map(key => figure.querySelector(".of-" + key));
  selects.forEach((select, i) => {
    d.formats.forEach((f, k) => { html("option", f.name, select).value = k; });
    select.selectedIndex = Math.min(i, F - 1);
    if (!F) select.parentNode.hidden = true;
    select.onchange = () => refresh();
  });
  if (!F) lossy.parentNode.hidden = true;
  const format = dir => F ? selects[dir].selectedIndex : -1;
  // Where blocks share scales there is no range for all.
  const band = dir => F && d.formats[format(dir)].max ? d.formats[format(dir)] : null;

  // A run's recorded step at or before the slider's; -1 before its first.
  const recorded = new Map();
  const at = (r, i, dir) => {
    const key = (r * N + i) * 2 + dir;
    let k = recorded.get(key);
    if (k === undefined) {
      const run = d.runs[r], now = steps[+slider.value];
      k = run.steps.length - 1;
      while (k >= 0 && (run.steps[k] > now || isNaN(run.numbers[((k * N + i) * 2 + dir) * K + 5]))) --k;
      recorded.set(key, k);
    }
    return k;
  };
  const row = (r, i, dir) => {
    const k = at(r, i, dir);
    if (k < 0) return null;
    const from = ((k * N + i) * 2 + dir) * K, x = d.runs[r].numbers.subarray(from, from + K), f = format(dir);
    const loss = f < 0 ? NaN : x[6 + 3 * f] + x[8 + 3 * f];
    return {step: d.runs[r].steps[k], std: x[0], mean_abs: x[1], abs_max: x[2], abs_min: x[3], zero: x[4], bad: x[5], loss,
      shares: d.formats.map((_, g) => [...x.subarray(6 + 3 * g, 9 + 3 * g)]), k};
  };

  // The axes hold still while the slider moves.
  const axis = [0, 1].map(dir => {
    let low = Infinity, high = -Infinity;
    for (const run of d.runs) for (let p = dir * K; p < run.numbers.length; p += 2 * K) {
      for (let f = 0; f < 3; ++f) { const e = lg(run.numbers[p + f]); if (e !== null) { low = Math.min(low, e); high = Math.max(high, e); } }
    }
    for (const f of d.formats) if (f.max) { low = Math.min(low, Math.log2(f.sub)); high = Math.max(high, Math.log2(f.max)); }
    if (low > high) { low = -8; high = 8; }
    high = Math.ceil(high) + 1;
    return {low: Math.max(Math.floor(low) - 1, high - 64), high};
  });
  const NAME = 232, OP = 118, PICTURE = 256, STD = 74, LOSS = 62;
  const left = [NAME + OP, NAME + OP + PICTURE + STD + LOSS];
  const x = (dir, e) => left[dir] + 4 + (Math.max(axis[dir].low, Math.min(axis[dir].high, e)) - axis[dir].low) / (axis[dir].high - axis[dir].low) * (PICTURE - 8);

  // What can be sorted by. NaN goes last either way.
  const best = (i, dir, get) => {
    let out = NaN;
    for (let r = 0; r < R; ++r) { const one = row(r, i, dir); if (one) { const v = get(one); if (!(v <= out)) out = isNaN(v) ? out : v; } }
    return out;
  };
  const operator = i => d.runs.map(run => run.operators[i]).find(o => o) || "";
  const columns = [
    {name: "tensor", x: 0, w: 60, get: i => i},
    {name: "name", x: 70, w: 60, get: i => d.tensors[i][0] + "." + d.tensors[i][1]},
    {name: "operator", x: NAME, w: OP, get: operator},
    {name: "values: max", x: left[0] + 4, w: 120, get: i => best(i, 0, s => s.abs_max)},
    {name: "std", x: left[0] + PICTURE, w: STD - 8, right: true, get: i => best(i, 0, s => s.std)},
    {name: "lost", x: left[0] + PICTURE + STD, w: LOSS - 8, right: true, get: i => best(i, 0, s => s.loss)},
    {name: "gradients: max", x: left[1] + 4, w: 120, get: i => best(i, 1, s => s.abs_max)},
    {name: "std", x: left[1] + PICTURE, w: STD - 8, right: true, get: i => best(i, 1, s => s.std)},
    {name: "lost", x: left[1] + PICTURE + STD, w: LOSS - 8, right: true, get: i => best(i, 1, s => s.loss)},
  ];
  let sorted = 0, down = false, order = [], chosen = -1;
  columns.forEach((column, c) => {
    const button = html("button", column.name, head);
    button.type = "button";
    button.style.left = column.x + "px";
    button.style.width = column.w + "px";
    if (column.right) button.className = "right";
    column.button = button;
    button.onclick = () => {
      // Numbers first the large ones.
      down = sorted === c ? !down : c > 2;
      sorted = c;
      arrange();
    };
  });
  const texts = d.tensors.map((t, i) => [t[0], t[1], ...d.runs.flatMap(run => [run.operators[i], run.parts[i]])].join(" ").toLowerCase());
  const arrange = () => {
    columns.forEach((column, c) => {
      if (c === sorted) column.button.setAttribute("aria-sort", down ? "descending" : "ascending");
      else column.button.removeAttribute("aria-sort");
    });
    const words = search.value.toLowerCase().split(/\s+/).filter(w => w), get = columns[sorted].get;
    const loses = i => [0, 1].some(dir => d.runs.some((_, r) => { const s = row(r, i, dir); return s && (s.loss >= 0.01 || s.bad > 0); }));
    const found = [];
    for (let i = 0; i < N; ++i) if (words.every(w => texts[i].includes(w)) && (!lossy.checked || loses(i))) found.push([get(i), i]);
    const sign = down ? -1 : 1;
    found.sort(([a, i], [b, k]) => typeof a === "string" ? sign * names.compare(a, b) || i - k
      : isNaN(a) || isNaN(b) ? isNaN(a) - isNaN(b) || i - k : sign * (a - b) || i - k);
    order = found.map(f => f[1]);
    space.style.height = order.length * rowHeight + "px";
    figure.querySelector(".count").textContent = order.length === N ? `${N} tensors` : `${order.length} of ${N} tensors`;
    draw();
  };

  const cut = (text, n) => text.length > n ? "\u2026" + text.slice(text.length - n + 1) : text;
  const word = (svg, px, py, text, kind, anchor, size = 11) => {
    make("text", {x: px, y: py, class: kind, "text-anchor": anchor, "font-size": size}, svg).textContent = text;
  };
  const marks = (svg, dir, s, y) => {
    const line = (a, b, width, opacity) => make("line", {class: "line", x1: a, x2: b, y1: y, y2: y, "stroke-width": width, opacity}, svg);
    const top = lg(s.abs_max), low = lg(s.abs_min), std = lg(s.std), mean = lg(s.mean_abs);
    if (top !== null) line(x(dir, low === null ? axis[dir].low : low), x(dir, top), 1.5, .45);
    if (mean !== null) make("path", {class: "line", "stroke-width": 1.5, d: `M${x(dir, mean)} ${y - 4}v8`}, svg);
    if (s.bad > 0) make("path", {class: "bad", "stroke-width": 2, d: `M${left[dir] + PICTURE - 14} ${y - 3.5}l7 7m0 -7l-7 7`}, svg);
    else if (std !== null) make("circle", {class: "area", cx: x(dir, std), cy: y, r: 3.2}, svg);
    else if (s.abs_max === 0) word(svg, left[dir] + 4, y + 3.5, "all 0", "muted", "start", 9);
  };
  let picture = null;
  const draw = () => {
    if (picture) picture.remove();
    const first = Math.max(0, Math.floor(scroll.scrollTop / rowHeight) - 3);
    const last = Math.min(order.length, first + Math.ceil((scroll.clientHeight || 640) / rowHeight) + 6);
    const high = (last - first) * rowHeight;
    picture = make("svg", {width: 1136, height: Math.max(1, high), viewBox: `0 0 1136 ${Math.max(1, high)}`});
    picture.style.top = first * rowHeight + "px";
    for (const dir of [0, 1]) {
      const f = band(dir), area = (a, b, kind) => x(dir, b) > x(dir, a) &&
        make("rect", {class: kind, x: x(dir, a), width: x(dir, b) - x(dir, a), y: 0, height: high}, picture);
      const {low, high: top} = axis[dir];
      if (f) {
        const [a, b, c] = [f.sub, f.normal, f.max].map(Math.log2);
        area(low, a, "band-lost"); area(a, b, "band-sub"); area(b, c, "band-normal"); area(c, top, "band-lost");
      } else area(low, top, "band-none");
      if (low < 0 && top > 0) make("line", {class: "one", "stroke-dasharray": "2 3", x1: x(dir, 0), x2: x(dir, 0), y1: 0, y2: high}, picture);
    }
    for (let p = first; p < last; ++p) {
      const i = order[p], t = d.tensors[i];
      const group = make("g", {class: "row" + (i === chosen ? " chosen" : ""), "data-tensor": i, transform: `translate(0 ${(p - first) * rowHeight})`}, picture);
      make("rect", {class: "hit", width: 1136, height: rowHeight, fill: "none", "pointer-events": "all"}, group);
      const mid = rowHeight / 2 + 4, name = cut(t[1], 24);
      word(group, NAME - 12, mid, name, "text", "end", 11.5);
      word(group, 0, mid, cut(t[0], Math.max(4, 36 - name.length)), "muted", "start", 11);
      word(group, NAME, mid, cut(operator(i).replace("aten::", ""), 18), "muted", "start", 11);
      for (let r = 0; r < R; ++r) {
        const one = make("g", {class: "s" + r}, group), y = R > 1 ? 8 + 11 * r : rowHeight / 2;
        for (const dir of [0, 1]) {
          const s = row(r, i, dir);
          if (!s) continue;
          marks(one, dir, s, y);
          word(one, left[dir] + PICTURE + STD - 8, y + 3.5, s.bad > 0 ? "NaN, inf" : short(s.std), "area", "end", 10.5);
          if (s.loss >= 0.0005) word(one, left[dir] + PICTURE + STD + LOSS - 8, y + 3.5, share(s.loss), "area", "end", 10.5);
        }
      }
      group.addEventListener("click", () => { chosen = i; draw(); tell(); });
    }
    space.append(picture);
  };
  const scale = make("svg", {width: 1136, height: 22, viewBox: "0 0 1136 22", "font-size": 11});
  for (const dir of [0, 1]) {
    const {low, high} = axis[dir], every = Math.max(1, Math.ceil((high - low) * 30 / PICTURE));
    for (let e = Math.ceil(low / every) * every; e <= high; e += every) {
      const label = make("text", {class: "muted", x: x(dir, e), y: 16, "text-anchor": "middle"}, scale);
      label.textContent = "2";
      make("tspan", {dy: -4, "font-size": 8}, label).textContent = e;
    }
  }
  head.append(scale);
  if (R > 1) {
    const legend = html("p", "", null);
    legend.className = "key";
    d.runs.forEach((run, r) => {
      const dot = html("span", "", legend);
      dot.className = "mark-std s" + r;
      dot.style.background = "var(--c)";
      legend.append(" " + run.name + " ");
    });
    head.before(legend);
  }

  // A tensor over the steps, in powers of two: a line the standard deviation, a faint one the largest.
  const course = (i, dir) => {
    const W = 540, H = 150, l = 42, base = H - 22, points = [];
    let low = Infinity, high = -Infinity;
    d.runs.forEach((run, r) => {
      for (const [field, opacity] of [[0, 1], [2, .4]]) {
        const line = [];
        run.steps.forEach((step, k) => {
          const e = lg(run.numbers[((k * N + i) * 2 + dir) * K + field]);
          if (e === null) return;
          line.push([step, e]);
          low = Math.min(low, e); high = Math.max(high, e);
        });
        points.push({r, opacity, line});
      }
    });
    if (low > high || steps.length < 2) return null;
    low = Math.floor(low); high = Math.max(low + 1, Math.ceil(high));
    const px = s => l + (s - steps[0]) / (steps[steps.length - 1] - steps[0]) * (W - l - 10), py = e => base - (e - low) / (high - low) * (base - 8);
    const svg = make("svg", {width: W, height: H, viewBox: `0 0 ${W} ${H}`, "font-size": 11, class: "course"});
    for (const e of [low, (low + high) / 2, high]) {
      make("line", {class: "grid", x1: l, x2: W - 10, y1: py(e), y2: py(e)}, svg);
      const label = make("text", {class: "muted", x: l - 5, y: py(e) + 4, "text-anchor": "end"}, svg);
      label.textContent = "2";
      make("tspan", {dy: -4, "font-size": 8}, label).textContent = e;
    }
    for (const p of points) {
      const group = make("g", {class: "s" + p.r}, svg);
      make("polyline", {class: "line", fill: "none", "stroke-width": 1.5, opacity: p.opacity, points: p.line.map(q => `${px(q[0])},${py(q[1])}`).join(" ")}, group);
    }
    const now = px(steps[+slider.value]);
    make("line", {class: "cursor", x1: now, x2: now, y1: 8, y2: base}, svg);
    word(svg, l, H - 6, "step " + steps[0], "muted", "start");
    word(svg, W - 10, H - 6, steps[steps.length - 1], "muted", "end");
    return svg;
  };
  const table = (caption, names, lines) => {
    const wide = html("div", "", detail), out = html("table", "", wide);
    wide.className = "wide";
    html("caption", caption, out);
    const top = html("tr", "", html("thead", "", out)), body = html("tbody", "", out);
    for (const name of names) html("th", name, top).style.padding = "4px 10px";
    for (const line of lines) { const tr = html("tr", "", body); for (const text of line) html("td", text, tr); }
  };
  const tell = () => {
    if (chosen < 0) return;
    const i = chosen, t = d.tensors[i], facts = [], losses = [];
    detail.replaceChildren();
    detail.hidden = false;
    html("h4", (t[0] ? t[0] + "  " : "") + t[1] + (t[3].length ? `  [${t[3].join(", ")}]` : ""), detail);
    const shown = {variants: d.runs.map(run => run.name), fwd_band: band(0), bwd_band: band(1)}, of = d.runs.map(() => ({}));
    d.runs.forEach((run, r) => keys.forEach((key, dir) => {
      const s = row(r, i, dir);
      if (!s) return;
      const what = [run.name + (run.parts[i] ? ", " + run.parts[i] : ""), dir ? "gradient" : "value"];
      facts.push([...what, run.operators[i], s.step, short(s.std), short(s.mean_abs), short(s.abs_max), short(s.abs_min), share(s.zero), s.bad]);
      d.formats.forEach((f, g) => { if (!isNaN(s.shares[g][0])) losses.push([...what, f.name, ...s.shares[g].map(v => share(v))]); });
      const from = ((s.k * N + i) * 2 + dir) * B, exponents = [];
      for (let b = 0; b < B; ++b) if (run.shares[from + b]) exponents.push([d.low + b, Math.round(run.shares[from + b] / 65535 * t[2])]);
      of[r][key] = {numel: t[2], exponents: exponents.length ? exponents : null};
    }));
    table("", ["run", "of", "operator", "at step", "std", "mean |x|", "max |x|", "min |x|", "zero", "NaN, inf"], facts);
    if (losses.length) table("What a format would do to it", ["run", "of", "format", "becomes 0", "loses digits", "too large"], losses);
    const panels = html("div", "", detail);
    panels.className = "panels";
    keys.forEach((key, dir) => {
      const word = dir ? "Gradients" : "Values", f = band(dir);
      for (const [picture, text] of [[histogram(shown, {of}, key), ": share of elements by power of two" + (f ? ", against " + f.name : "")],
          [course(i, dir), ": standard deviation, and the largest (faint), over the steps"]]) {
        if (!picture) continue;
        const panel = html("div", "", panels);
        html("div", word + text, panel);
        panel.append(picture);
      }
    });
  };
  const refresh = () => {
    recorded.clear();
    output.textContent = steps[+slider.value];
    arrange();
    tell();
  };
  slider.max = steps.length - 1;
  slider.value = steps.length - 1;
  slider.oninput = refresh;
  slider.parentNode.hidden = steps.length < 2;
  search.oninput = lossy.onchange = arrange;
  scroll.addEventListener("scroll", draw);
  refresh();
}
)js";
}

}  // namespace plumb

// What all parts of a page use; tool tips, the theme, tables.
const SVG = "http://www.w3.org/2000/svg";
const all = (selector, of = document) => [...of.querySelectorAll(selector)];
const make = (name, attributes = {}, of = null) => {
  const element = document.createElementNS(SVG, name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (of) of.append(element);
  return element;
};
const html = (name, text = "", of = null, kind = "") => {
  const element = document.createElement(name);
  element.textContent = text;
  if (kind) element.className = kind;
  if (of) of.append(element);
  return element;
};
const word = (svg, x, y, text, kind, anchor = "start", size = 11) => {
  const element = make("text", {x, y, class: kind, "text-anchor": anchor, "font-size": size}, svg);
  element.textContent = text;
  return element;
};
// 2 with an exponent.
const power = (svg, x, y, exponent, anchor) => {
  const label = word(svg, x, y, "2", "muted", anchor);
  make("tspan", {dy: -4, "font-size": 8}, label).textContent = exponent;
};
const short = v => v === null || v === undefined ? "-" : v === 0 ? "0" : Math.abs(v) >= 1e-3 && Math.abs(v) < 1e6
  ? String(+v.toPrecision(4)) : v.toExponential(2);
const share = v => v === undefined || v === null ? "-" : v > 0 && v < 1e-5 ? "<0.001%" : (100 * v).toFixed(v && v < 0.001 ? 3 : 1) + "%";
const data = figure => JSON.parse(figure.querySelector("script").textContent);
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer;
const names = new Intl.Collator(undefined, {numeric: true});
const words = text => text.toLowerCase().split(/\s+/).filter(w => w);
// Calls `draw` with the width there is, now and when it changes.
const fitted = (element, draw) => {
  let width = 0;
  const look = () => {
    const now = Math.round(element.clientWidth) || 640;
    if (now !== width) draw(width = now);
  };
  look();
  new ResizeObserver(look).observe(element);
};

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
document.addEventListener("pointermove", e => {
  let text = null;
  for (let at = e.target; at && at.closest && at !== document.body && at.tagName !== "svg"; at = at.parentNode) {
    const title = [...at.children].find(child => child.tagName === "title");
    if (title) { told.set(at, title.textContent); title.remove(); }
    if (told.has(at)) { text = told.get(at); break; }
  }
  if (text !== null) show(text, e.clientX, e.clientY);
  else if (!(e.target.closest && e.target.closest(".plot"))) tip.hidden = true;
});

const root = document.documentElement, night = matchMedia("(prefers-color-scheme:dark)");
night.addEventListener("change", () => { root.dataset.theme = night.matches ? "dark" : "light"; });
// A page that is still being written loads itself again, where it stands, unless somebody uses it.
const reload = +document.body.dataset.reload;
if (reload) {
  let used = -Infinity;
  for (const kind of ["pointermove", "keydown", "wheel"]) document.addEventListener(kind, () => { used = performance.now(); });
  setInterval(() => { if (!document.hidden && performance.now() - used > 1000 * reload) location.reload(); }, 1000 * reload);
}
document.getElementById("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };

// Tables: a click sorts, a second one the other way round; rows under another one are folded. Of a long table only the
// first rows are laid out until all are asked for: laying out thousands takes seconds.
const MOST = 200;
for (const table of all("table")) {
  const body = table.tBodies[0], groups = [];
  for (const row of [...body.rows]) {
    if (row.classList.contains("under") && groups.length) groups[groups.length - 1].under.push(row);
    else groups.push({row, under: [], open: false});
  }
  let more = null;
  const lay = () => {
    const shown = more ? groups.slice(0, MOST) : groups;
    body.replaceChildren(...shown.flatMap(g => g.open ? [g.row, ...g.under] : [g.row]));
  };
  for (const group of groups) {
    if (!group.under.length) continue;
    const button = html("button", "", null, "fold");
    button.type = "button";
    button.title = "fold, unfold";
    group.row.cells[0].prepend(button);
    const turn = open => { group.open = open; button.setAttribute("aria-expanded", open); };
    turn(false);
    group.row.style.cursor = "pointer";
    group.row.onclick = () => { turn(!group.open); lay(); };
  }
  if (groups.length > MOST + 50) {
    more = html("button", `all ${groups.length} rows`, null, "more");
    more.type = "button";
    more.onclick = () => { more.remove(); more = null; lay(); };
    table.after(more);
  }
  lay();
  all("th", table).forEach((head, column) => {
    head.firstChild.onclick = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      all("th", table).forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const numeric = head.classList.contains("number");
      const key = row => {
        const text = row.cells[column].textContent.trim();
        return numeric ? parseFloat(text) : text;
      };
      // What is no number goes last either way.
      const sort = (list, row) => {
        const keys = new Map(list.map(one => [one, key(row(one))]));
        list.sort((one, other) => {
          const a = keys.get(one), b = keys.get(other);
          return numeric ? (isNaN(a) || isNaN(b) ? isNaN(a) - isNaN(b) : down ? b - a : a - b) : (down ? -1 : 1) * names.compare(a, b);
        });
      };
      sort(groups, g => g.row);
      for (const group of groups) sort(group.under, row => row);
      lay();
    };
  });
}

// A graph: modules fold, a search marks lines, the wires of the line under the pointer stand out.
for (const figure of all(".graph-view")) {
  const d = data(figure), svg = figure.querySelector(".graph-scroll svg"), search = figure.querySelector("input"), count = figure.querySelector(".count");
  const lines = all(".node, .module-head", svg), boxes = all(".module", svg), wires = all(".wire", svg), scroll = svg.parentNode;
  const folded = new Set(), places = [];
  const around = i => {
    const out = [];
    for (let m = d.entries[i][1]; m >= 0; m = d.modules[m][0]) out.push(m);
    return out;
  };
  const chains = d.entries.map((_, i) => around(i));
  // The line that stands for this one: the head of the outermost folded module around it.
  const stand_in = i => {
    const m = chains[i].filter(m => folded.has(m)).pop();
    return m === undefined ? i : d.modules[m][2];
  };
  const indent = i => d.indent * (d.entries[i][1] < 0 ? 0 : d.modules[d.entries[i][1]][1] + (d.entries[i][0] ? 1 : 0));
  const middle_of = i => places[i] + (d.entries[i][0] ? d.row : d.head) / 2;
  const lay = () => {
    let y = d.top, before = -1;
    const visible = [], ends = new Map();
    lines.forEach((line, i) => {
      const shown = stand_in(i) === i;
      line.style.display = shown ? "" : "none";
      if (!shown) return;
      if (before >= 0) y += d.pad * chains[before].filter(m => !chains[i].includes(m)).length;
      places[i] = y;
      line.setAttribute("transform", `translate(${indent(i)} ${y})`);
      y += d.entries[i][0] ? d.row : d.head;
      chains[i].forEach((m, inside) => ends.set(m, y + d.pad * inside + 3));
      visible.push(i);
      before = i;
    });
    const total = y + 3 * d.pad + d.top;
    svg.setAttribute("height", total);
    svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${total}`);
    boxes.forEach((box, m) => {
      const shown = stand_in(d.modules[m][2]) === d.modules[m][2];
      box.style.display = shown ? "" : "none";
      if (!shown) return;
      box.setAttribute("y", places[d.modules[m][2]]);
      box.setAttribute("height", ends.get(m) - places[d.modules[m][2]]);
    });
    wires.forEach((wire, w) => {
      const [source, targets, lane] = d.wires[w], from = stand_in(source), to = [...new Set(targets.map(stand_in))].filter(t => t !== from);
      wire.style.display = to.length ? "" : "none";
      if (!to.length) return;
      const right = i => d.width - indent(i) - 4;
      if (lane < 0) {
        const x = indent(to[0]) + 14;
        wire.setAttribute("d", `M${x} ${places[from] + (d.entries[from][0] ? d.row : d.head) - 3}V${places[to[0]] + 3}`);
        return;
      }
      const x = d.width + 14 + d.lane * lane;
      wire.setAttribute("d", `M${right(from)} ${middle_of(from)}H${x}V${middle_of(to[to.length - 1])}` +
        to.map(t => `M${x} ${middle_of(t)}H${right(t)}m4 -3l-4 3l4 3`).join(""));
    });
    for (const [m, [, , head]] of d.modules.entries()) {
      const text = lines[head].querySelector("text");
      text.textContent = (folded.has(m) ? "\u25B8 " : "\u25BE ") + names_of[m] + (folded.has(m) ? `  (${d.modules[m][3] - head} lines)` : "");
    }
  };
  const names_of = d.modules.map(([, , head]) => lines[head].querySelector("text").textContent);
  d.modules.forEach(([, , head], m) => {
    lines[head].style.cursor = "pointer";
    lines[head].onclick = () => { folded.has(m) ? folded.delete(m) : folded.add(m); lay(); };
  });
  figure.querySelector(".fold-all").onclick = () => { d.modules.forEach((_, m) => folded.add(m)); lay(); };
  figure.querySelector(".unfold-all").onclick = () => { folded.clear(); lay(); };
  let found = [], at = 0;
  const go = () => {
    if (!found.length) return;
    const i = found[at % found.length];
    scroll.scrollTop = Math.max(0, places[i] - scroll.clientHeight / 3);
    count.textContent = `${at % found.length + 1} of ${found.length}`;
  };
  search.oninput = () => {
    const asked = words(search.value);
    found = asked.length ? d.entries.map((e, i) => i).filter(i => asked.every(w => d.entries[i][2].toLowerCase().includes(w))) : [];
    lines.forEach((line, i) => line.classList.toggle("found", found.includes(i)));
    for (const i of found) for (const m of chains[i]) if (d.modules[m][2] !== i) folded.delete(m);
    lay();
    at = 0;
    count.textContent = asked.length ? "nothing" : `${d.entries.filter(e => e[0]).length} lines`;
    go();
  };
  search.onkeydown = e => { if (e.key === "Enter") { ++at; go(); } };
  lines.forEach((line, i) => {
    const light = on => wires.forEach((wire, w) => {
      const [source, targets] = d.wires[w];
      if (stand_in(source) === i || targets.some(t => stand_in(t) === i)) wire.classList.toggle("lit", on);
    });
    line.addEventListener("pointerenter", () => light(true));
    line.addEventListener("pointerleave", () => light(false));
  });
  // Of a large graph the first layer lies open, the layers like it are folded.
  if (lines.length > 150) {
    d.modules.forEach(([, , head], m) => { if (/^\d+$/.test(names_of[m]) && names_of[m] !== "0") folded.add(m); });
  }
  search.oninput();
}

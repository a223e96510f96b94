// A graph: modules fold, equal ones roll up, a search marks lines, the wires of the line under the pointer stand out.
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
  const names_of = d.modules.map(([, , head]) => lines[head].querySelector("text").textContent);
  // A box that holds another box alone: "h" around "0", where something stands between the layers.
  const inner = new Map();
  d.modules.forEach(([parent, , head, last], m) => { if (parent >= 0 && d.modules[parent][2] + 1 === head && d.modules[parent][3] === last) inner.set(parent, m); });
  const numbered = m => { while (inner.has(m) && !/^\d+$/.test(names_of[m])) m = inner.get(m); return m; };
  const path_of = m => inner.has(m) ? names_of[m] + "." + path_of(inner.get(m)) : names_of[m];
  // Neighbors with the numbers n, n + 1, ..., the same lines and the same lines between them: [{members, between, rolled}].
  const lines_of = m => {
    const [, depth, head, last] = d.modules[m], out = [];
    for (let i = head + 1; i <= last; ++i) out.push(d.modules[d.entries[i][1]][1] - depth, ...all("text", lines[i]).map(t => t.textContent));
    return out.join("\n");
  };
  const groups = [], group_of = new Map(), between_of = new Map(), last_group = new Map();  // the last by parent
  d.modules.forEach(([parent, , head], m) => {
    const core = numbered(m);
    if (!/^\d+$/.test(names_of[core]) || (parent >= 0 && inner.get(parent) === m && numbered(parent) === core)) return;
    const prefix = core === m ? "" : names_of[m], text = lines_of(core), number = +names_of[core], group = last_group.get(parent);
    const from = group ? d.modules[group.members[group.members.length - 1]][3] + 1 : 0, gap = [];
    for (let i = from; group && i < head && gap.length <= 8; ++i) gap.push(i);
    const plain = gap.length <= 8 && gap.every(i => d.entries[i][1] === parent), gap_text = gap.flatMap(i => all("text", lines[i]).map(t => t.textContent)).join("\n");
    const same = group && plain && group.prefix === prefix && group.next === number && group.text === text;
    if (same && (group.members.length === 1 || group.gap === gap_text)) {
      group.members.push(m);
      group.between.push(...gap);
      group.gap = gap_text;
      group.next++;
    } else {
      last_group.set(parent, {members: [m], between: [], prefix, text, next: number + 1, rolled: false});
      groups.push(last_group.get(parent));
    }
  });
  for (const group of groups) if (group.members.length > 1) {
    for (const m of group.members) group_of.set(m, group);
    for (const i of group.between) between_of.set(i, group);
  }
  const rolled = m => group_of.has(m) && group_of.get(m).rolled;
  // The line that stands for this one: the head of the outermost folded module around it, or of the first of its equals.
  const stand_in = i => {
    const m = chains[i].filter(m => folded.has(m) || rolled(m)).pop();
    const group = m === undefined ? between_of.get(i) : rolled(m) && group_of.get(m);
    return group && (group.rolled || m !== undefined) ? d.modules[group.members[0]][2] : m === undefined ? i : d.modules[m][2];
  };
  // With room to the right: types below each other, and where a line was written.
  const texts = lines.map(line => all("text", line)), wide_of = (t, size) => t ? t.textContent.length * size * .58 : 0;
  const sources = lines.map((line, i) => d.entries[i][0] ? word(line, 0, 17, "", "muted", "start", 11) : null);
  const detail_at = texts.map(([, detail]) => detail && +detail.getAttribute("x"));
  const beside = +svg.getAttribute("width") - d.width;  // width of the lanes
  let W = d.width, place = 0;
  const indent = i => d.indent * (d.entries[i][1] < 0 ? 0 : d.modules[d.entries[i][1]][1] + (d.entries[i][0] ? 1 : 0));
  const middle_of = i => places[i] + (d.entries[i][0] ? d.row : d.head) / 2;
  const lay = () => {
    let y = d.top, before = -1;
    const needed = Math.max(240, ...lines.map((_, i) => stand_in(i) === i ? 2 * indent(i) + wide_of(texts[i][0], 12) + wide_of(texts[i][1], 11) + 44 : 0));
    W = Math.max(needed, place - beside - 2);
    const visible = [], ends = new Map();
    const titles = lines.map((_, i) => indent(i) + 14 + wide_of(texts[i][0], 12));
    const title_ends = 16 + Math.max(...titles), detail_wide = 24 + Math.max(0, ...texts.map(([, detail]) => wide_of(detail, 11)));
    lines.forEach((line, i) => {
      const shown = stand_in(i) === i;
      line.style.display = shown ? "" : "none";
      if (!shown) return;
      if (before >= 0) y += d.pad * chains[before].filter(m => !chains[i].includes(m)).length;
      places[i] = y;
      line.setAttribute("transform", `translate(${indent(i)} ${y})`);
      line.querySelector("rect").setAttribute("width", W - 2 * indent(i) - (d.entries[i][0] ? 8 : 0));
      const [title, detail] = texts[i], roomy = W > needed + 80, column = Math.min(W * .36, title_ends), third = Math.min(W * .66, column + detail_wide);
      if (detail) detail.setAttribute("x", roomy && 14 + wide_of(title, 12) < column - indent(i) ? column - indent(i) : detail_at[i]);
      if (sources[i]) {
        const room = Math.floor((W - third - indent(i) - 20) / 6.4), source = d.entries[i][3];
        sources[i].setAttribute("x", third - indent(i));
        const free = third - indent(i) > +(detail || title).getAttribute("x") + wide_of(detail || title, 11) + 8;
        sources[i].textContent = roomy && room > 16 && free ? source.length > room ? "\u2026" + source.slice(1 - room) : source : "";
      }
      y += d.entries[i][0] ? d.row : d.head;
      chains[i].forEach((m, inside) => ends.set(m, y + d.pad * inside + 3));
      visible.push(i);
      before = i;
    });
    const total = y + 3 * d.pad + d.top;
    svg.setAttribute("height", total);
    svg.setAttribute("width", W + beside);
    svg.setAttribute("viewBox", `0 0 ${W + beside} ${total}`);
    boxes.forEach((box, m) => {
      const shown = stand_in(d.modules[m][2]) === d.modules[m][2];
      box.style.display = shown ? "" : "none";
      if (!shown) return;
      box.setAttribute("width", W - 2 * d.indent * d.modules[m][1]);
      box.setAttribute("y", places[d.modules[m][2]]);
      box.setAttribute("height", ends.get(m) - places[d.modules[m][2]]);
    });
    wires.forEach((wire, w) => {
      const [source, targets, lane] = d.wires[w], from = stand_in(source), to = [...new Set(targets.map(stand_in))].filter(t => t !== from);
      wire.style.display = to.length ? "" : "none";
      if (!to.length) return;
      const right = i => W - indent(i) - 4;
      if (lane < 0) {
        const x = indent(to[0]) + 14;
        wire.setAttribute("d", `M${x} ${places[from] + (d.entries[from][0] ? d.row : d.head) - 3}V${places[to[0]] + 3}`);
        return;
      }
      const x = W + 14 + d.lane * lane;
      wire.setAttribute("d", `M${right(from)} ${middle_of(from)}H${x}V${middle_of(to[to.length - 1])}` +
        to.map(t => `M${x} ${middle_of(t)}H${right(t)}m4 -3l-4 3l4 3`).join(""));
    });
    for (const [m, [, , head]] of d.modules.entries()) {
      const text = lines[head].querySelector("text"), size = d.modules[m][3] - head;
      if (rolled(m)) {
        const {members, prefix} = group_of.get(m), parent = d.modules[m][0], of = prefix || (parent < 0 ? "" : names_of[parent]);
        const [first, last] = [members[0], members[members.length - 1]].map(each => names_of[numbered(each)]);
        text.textContent = `\u25B8 ${of && of + " "}${first} to ${last}: ${members.length} \u00d7  (${d.modules[m][3] - d.modules[numbered(m)][2]} lines each)`;
      } else text.textContent = folded.has(m) ? `\u25B8 ${path_of(m)}  (${size} lines)` : "\u25BE " + names_of[m];
    }
  };
  const open = group => { if (group && group.rolled) { group.rolled = false; for (const each of group.members) folded.add(each); } };
  const unroll = m => open(group_of.get(m));
  d.modules.forEach(([, , head], m) => {
    lines[head].style.cursor = "pointer";
    lines[head].onclick = () => { rolled(m) ? unroll(m) : folded.has(m) ? folded.delete(m) : folded.add(m); lay(); };
  });
  const fold_all = () => { d.modules.forEach((_, m) => folded.add(m)); for (const group of groups) group.rolled = true; };
  figure.querySelector(".fold-all").onclick = () => { fold_all(); lay(); };
  figure.querySelector(".unfold-all").onclick = () => { for (const group of groups) group.rolled = false; folded.clear(); lay(); };
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
    for (const i of found) open(between_of.get(i));
    for (const i of found) for (const m of [...chains[i]].reverse()) { unroll(m); if (d.modules[m][2] !== i) folded.delete(m); }
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
  // A graph that is larger than a screen opens folded, down to where its layers are rolled up, or to a few lines.
  if (lines.length > 40) {
    fold_all();
    const shown = () => lines.map((_, i) => i).filter(i => stand_in(i) === i);
    const wraps = m => [...group_of.keys()].some(each => around(d.modules[each][2]).includes(m) && each !== m && !around(d.modules[m][2]).some(rolled));
    d.modules.forEach((_, m) => { if (!rolled(m) && wraps(m)) folded.delete(m); });
    for (let m; shown().length < 4 && (m = d.modules.findIndex(([, , head], m) => folded.has(m) && !rolled(m) && stand_in(head) === head)) >= 0;) folded.delete(m);
  }
  search.oninput();
  // The tools are as wide as the graph, and do not change with it.
  fitted(figure.querySelector(".tools"), () => { place = scroll.clientWidth; lay(); });
}

// Recorded tensors: a list of which only what is in sight is drawn, a tensor's details, a layer's course over the steps.
const lg = v => v > 0 && isFinite(v) ? Math.log2(v) : null;

// What a format loses at either end.
const bands = (svg, band, x, low, high, y, height) => {
  const area = (a, b, kind) => b > a && make("rect", {class: kind, x: a, y, width: b - a, height}, svg);
  if (!band) return area(x(low), x(high), "band-none");
  const [a, b, c] = [band.sub, band.normal, band.max].map(v => x(Math.log2(v)));
  area(x(low), a, "band-lost"); area(a, b, "band-sub"); area(b, c, "band-normal"); area(c, x(high), "band-lost");
};

// found: [{run, color, numel, exponents: [[e, count]]}].
const histogram = (target, found, band) => {
  let low = Infinity, high = -Infinity, top = 0;
  for (const {numel, exponents} of found) for (const [e, n] of exponents) {
    low = Math.min(low, e); high = Math.max(high, e); top = Math.max(top, n / numel);
  }
  if (low > high) return;
  if (band) { low = Math.min(low, Math.floor(Math.log2(band.sub)) - 1); high = Math.max(high, Math.ceil(Math.log2(band.max))); }
  fitted(html("div", "", target), W => {
    const H = 170, left = 42, base = H - 24, wide = W - left - 8, step = wide / (high + 1 - low);
    const x = e => left + Math.max(0, Math.min(wide, (e - low) * step)), y = p => base - p / top * (base - 10);
    target.lastChild.replaceChildren();
    const svg = make("svg", {width: W, height: H, viewBox: `0 0 ${W} ${H}`, "font-size": 11}, target.lastChild);
    bands(svg, band, x, low, high + 1, 6, base - 6);
    for (const e of ticks(low, high + 1, wide / 34)) if (Number.isInteger(e)) power(svg, x(e), base + 15, e, "middle");
    for (const p of [top / 2, top]) word(svg, left - 5, y(p) + 4, share(p), "muted", "end");
    const bar = step / found.length;
    found.forEach(({run, color, numel, exponents}, i) => {
      const group = make("g", {class: "s" + color}, svg);
      for (const [e, n] of exponents) {
        const rect = make("rect", {class: "area", x: x(e) + i * bar + bar * .08, width: bar * .84, y: y(n / numel), height: base - y(n / numel), opacity: .85}, group);
        make("title", {}, rect).textContent = `${run}\n2^${e} <= |x| < 2^${e + 1}: ${share(n / numel)} (${n} of ${numel})`;
      }
    });
    make("line", {class: "axis", x1: left, x2: left + wide, y1: base, y2: base}, svg);
  });
};

// The numbers of a page's history: rows by run, tensor, direction and step.
const packed = d => {
  const N = d.tensors.length, F = d.formats.length, K = 6 + 3 * F, B = d.bins;
  for (const run of d.runs) {
    run.numbers = new Float32Array(bytes(run.numbers));
    run.shares = new Uint16Array(bytes(run.shares));
  }
  const steps = [...new Set(d.runs.flatMap(run => run.steps))].sort((a, b) => a - b), known = new Map();
  const place = (i, dir, k) => (k * N + i) * 2 + dir;
  // At a run's recorded step k, null where nothing was recorded then; a field is null where it was not measured.
  const at = (r, i, dir, k, f) => {
    const run = d.runs[r], from = place(i, dir, k) * K, x = run.numbers.subarray(from, from + K);
    if (k < 0 || isNaN(x[5])) return null;
    const [std, mean_abs, abs_max, abs_min, zero, bad] = [...x.subarray(0, 6)].map(v => v < 0 ? null : v);
    const loss = f < 0 || isNaN(x[6 + 3 * f]) ? null : x[6 + 3 * f] + x[8 + 3 * f];
    return {step: run.steps[k], k, std, mean_abs, abs_max, abs_min, zero, bad, loss, shares: d.formats.map((_, g) => [...x.subarray(6 + 3 * g, 9 + 3 * g)])};
  };
  // At the recorded step at or before `now`.
  const last = (r, i, dir, now, f) => {
    const run = d.runs[r], key = (r * N + i) * 2 + dir;
    let found = known.get(key);
    if (!found || found.now !== now) {
      let k = run.steps.length - 1;
      while (k >= 0 && (run.steps[k] > now || isNaN(run.numbers[place(i, dir, k) * K + 5]))) --k;
      known.set(key, found = {now, k});
    }
    return at(r, i, dir, found.k, f);
  };
  const exponents = (r, i, dir, k) => {
    const out = [], from = place(i, dir, k) * B, run = d.runs[r];
    for (let b = 0; b < B; ++b) if (run.shares[from + b]) out.push([d.low + b, run.shares[from + b] / 65535]);
    return out;
  };
  return {steps, at, last, exponents};
};

// Between these exponents lie all but 5 % of the elements on either side.
const middle = exponents => {
  const total = exponents.reduce((sum, [, n]) => sum + n, 0);
  const find = part => {
    let want = part * total;
    for (const [e, n] of exponents) { if (want <= n) return e + want / n; want -= n; }
    return exponents[exponents.length - 1][0] + 1;
  };
  return total > 0 ? [find(.05), find(.95)] : null;
};

for (const figure of all(".history-view")) {
  const d = data(figure), N = d.tensors.length, R = d.runs.length, F = d.formats.length, {steps, at, last, exponents} = packed(d);
  const keys = ["Values", "Gradients"], one = selector => figure.querySelector(selector);
  const slider = one(".stepper input"), output = one(".stepper output"), search = one("input[type=search]"), lossy = one(".lossy input");
  const scroll = one(".history-scroll"), space = one(".history-space"), head = one(".history-head"), detail = one(".detail");
  const selects = [one(".of-fwd"), one(".of-bwd")], side = one(".side");
  selects.forEach((select, i) => {
    d.formats.forEach((f, k) => { html("option", f.name, select).value = k; });
    select.selectedIndex = Math.min(i, F - 1);
    select.parentNode.hidden = !F;
    select.onchange = () => refresh();
  });
  lossy.parentNode.hidden = !F;
  const format = dir => F ? selects[dir].selectedIndex : -1;
  // Where blocks share scales there is no range for all.
  const band = dir => F && d.formats[format(dir)].max ? d.formats[format(dir)] : null;
  const row = (r, i, dir) => last(r, i, dir, steps[+slider.value], format(dir));

  // The axes hold still while the slider moves.
  const measured = [false, false];
  const axis = [0, 1].map(dir => {
    let low = Infinity, high = -Infinity;
    for (let r = 0; r < R; ++r) for (let i = 0; i < N; ++i) for (let k = 0; k < d.runs[r].steps.length; ++k) {
      const s = at(r, i, dir, k, -1);
      measured[dir] ||= !!s;
      for (const v of s ? [s.std, s.mean_abs, s.abs_max] : []) { const e = lg(v); if (e !== null) { low = Math.min(low, e); high = Math.max(high, e); } }
    }
    for (const f of d.formats) if (f.max) { low = Math.min(low, Math.log2(f.sub)); high = Math.max(high, Math.log2(f.max)); }
    if (low > high) { low = -8; high = 8; }
    high = Math.ceil(high) + 1;
    return {low: Math.max(Math.floor(low) - 1, high - 64), high};
  });
  const sides = measured[1] ? measured[0] ? [0, 1] : [1] : [0];
  selects.forEach((select, dir) => { select.parentNode.hidden ||= !sides.includes(dir); });
  // Places by width: a narrow page shows values or gradients, and no operators.
  const rowHeight = 6 + 11 * Math.max(1, R);
  let W = 0, panels = [], NAME = 0, OP = 0, columns = [];
  const x = (p, e) => p.left + 4 + (Math.max(axis[p.dir].low, Math.min(axis[p.dir].high, e)) - axis[p.dir].low) / (axis[p.dir].high - axis[p.dir].low) * (p.wide - 8);

  // What can be sorted by. NaN goes last either way.
  const best = (i, dir, get) => {
    let out = NaN;
    for (let r = 0; r < R; ++r) { const s = row(r, i, dir); if (s) { const v = get(s) ?? NaN; if (!(v <= out)) out = isNaN(v) ? out : v; } }
    return out;
  };
  const operator = i => d.runs.map(run => run.operators[i]).find(o => o) || "";
  let sorted = "tensor", down = false, order = [], chosen = -1;
  const place = width => {
    W = width;
    const narrow = W < 620, dirs = narrow && sides.length > 1 ? [side.selectedIndex] : sides;
    side.parentNode.hidden = !narrow || sides.length < 2;
    NAME = narrow ? Math.min(176, W * .46) : W < 900 ? 190 : 232;
    OP = W < 900 ? 0 : 118;
    const STD = narrow ? 0 : W < 900 ? 58 : 70, LOSS = 52;
    const wide = (W - NAME - OP) / dirs.length - STD - LOSS;
    panels = dirs.map((dir, n) => ({dir, left: NAME + OP + n * (wide + STD + LOSS), wide, std: STD, loss: LOSS}));
    columns = [{key: "tensor", x: 0, w: 62, get: i => i}, {key: "name", x: 66, w: NAME - 70, get: i => d.tensors[i][0] + "." + d.tensors[i][1]}];
    if (OP) columns.push({key: "operator", x: NAME, w: OP, get: operator});
    for (const p of panels) {
      const key = keys[p.dir].toLowerCase();
      columns.push({key: key + ": max", x: p.left + 4, w: Math.max(40, p.wide - 8), get: i => best(i, p.dir, s => s.abs_max)});
      if (p.std) columns.push({key: key + ": std", text: "std", x: p.left + p.wide, w: p.std - 8, right: true, get: i => best(i, p.dir, s => s.std)});
      columns.push({key: key + ": lost", text: "lost", x: p.left + p.wide + p.std, w: p.loss - 8, right: true, get: i => best(i, p.dir, s => s.loss)});
    }
    head.replaceChildren();
    for (const column of columns) {
      const button = html("button", column.text || column.key, head, column.right ? "right" : "");
      Object.assign(button, {type: "button", title: "sort by " + column.key});
      Object.assign(button.style, {left: column.x + "px", width: column.w + "px"});
      button.dataset.sort = column.key;
      column.button = button;
      button.onclick = () => {
        // Numbers first the large ones.
        down = sorted === column.key ? !down : !["tensor", "name", "operator"].includes(column.key);
        sorted = column.key;
        arrange();
      };
    }
    const scale = make("svg", {width: W, height: 22, viewBox: `0 0 ${W} 22`, "font-size": 11}, head);
    for (const p of panels) {
      const {low, high} = axis[p.dir];
      for (const e of ticks(low, high, p.wide / 30)) if (Number.isInteger(e)) power(scale, x(p, e), 16, e, "middle");
    }
  };
  const texts = d.tensors.map((t, i) => [t[0], t[1], ...d.runs.flatMap(run => [run.operators[i], run.parts[i]])].join(" ").toLowerCase());
  const arrange = () => {
    const column = columns.find(c => c.key === sorted) || columns[0], get = column.get;
    for (const c of columns) {
      if (c === column) c.button.setAttribute("aria-sort", down ? "descending" : "ascending");
      else c.button.removeAttribute("aria-sort");
    }
    const asked = words(search.value);
    const loses = i => [0, 1].some(dir => d.runs.some((_, r) => { const s = row(r, i, dir); return s && (s.loss >= 0.01 || s.bad > 0); }));
    const found = [];
    for (let i = 0; i < N; ++i) if (asked.every(w => texts[i].includes(w)) && (!lossy.checked || loses(i))) found.push([get(i), i]);
    const sign = down ? -1 : 1;
    found.sort(([a, i], [b, k]) => typeof a === "string" ? sign * names.compare(a, b) || i - k
      : isNaN(a) || isNaN(b) ? isNaN(a) - isNaN(b) || i - k : sign * (a - b) || i - k);
    order = found.map(f => f[1]);
    space.style.height = order.length * rowHeight + "px";
    one(".count").textContent = order.length === N ? `${N} tensors` : `${order.length} of ${N} tensors`;
    draw();
  };

  const cut = (text, n) => text.length > n ? "\u2026" + text.slice(text.length - n + 1) : text;
  // A module's path in so many characters. The layer's number stays: "0.attn.qkv", "0\u2026qkv" for "layers.0.attn.qkv".
  const brief = (path, n) => {
    const layer = /(?:^|\.)(\d+)(\..*)?$/.exec(path);
    if (path.length <= n || !layer) return cut(path, n);
    const [, number, rest = ""] = layer;
    return number.length + rest.length <= n ? number + rest : number + cut(rest, Math.max(1, n - number.length));
  };
  const marks = (svg, p, r, i, s, y) => {
    const line = (a, b, width, opacity) => make("line", {class: "line", "stroke-width": width, opacity, x1: a, x2: b, y1: y, y2: y}, svg);
    const top = lg(s.abs_max), low = lg(s.abs_min), std = lg(s.std), mean = lg(s.mean_abs), bulk = middle(exponents(r, i, p.dir, s.k));
    if (top !== null) line(x(p, low === null ? axis[p.dir].low : low), x(p, top), 1.5, .45);
    if (bulk) line(x(p, bulk[0]), x(p, Math.min(bulk[1], top === null ? Infinity : top)), 5, .3);
    if (mean !== null) make("path", {class: "line", "stroke-width": 1.5, d: `M${x(p, mean)} ${y - 4}v8`}, svg);
    if (s.bad > 0) make("path", {class: "bad", "stroke-width": 2, d: `M${p.left + p.wide - 14} ${y - 3.5}l7 7m0 -7l-7 7`}, svg);
    else if (std !== null) make("circle", {class: "area", cx: x(p, std), cy: y, r: 3.2}, svg);
    else if (s.abs_max === 0) word(svg, p.left + 4, y + 3.5, "all 0", "muted", "start", 9);
  };
  let picture = null;
  const draw = () => {
    if (picture) picture.remove();
    const first = Math.max(0, Math.floor(scroll.scrollTop / rowHeight) - 3);
    const end = Math.min(order.length, first + Math.ceil((scroll.clientHeight || 640) / rowHeight) + 6);
    const high = Math.max(1, (end - first) * rowHeight);
    picture = make("svg", {width: W, height: high, viewBox: `0 0 ${W} ${high}`});
    picture.style.top = first * rowHeight + "px";
    for (const p of panels) {
      const {low, high: top} = axis[p.dir];
      bands(picture, band(p.dir), e => x(p, e), low, top, 0, high);
      if (low < 0 && top > 0) make("line", {class: "one", "stroke-dasharray": "2 3", x1: x(p, 0), x2: x(p, 0), y1: 0, y2: high}, picture);
    }
    for (let n = first; n < end; ++n) {
      const i = order[n], t = d.tensors[i];
      const group = make("g", {class: "row" + (i === chosen ? " chosen" : ""), "data-tensor": i, transform: `translate(0 ${(n - first) * rowHeight})`}, picture);
      make("rect", {class: "hit", width: W, height: rowHeight, fill: "none", "pointer-events": "all"}, group);
      make("title", {}, group).textContent = (t[0] ? t[0] + "." : "") + t[1];
      const mid = rowHeight / 2 + 4, room = Math.floor((NAME - 14) / 6.4), name = cut(t[1], Math.min(24, room - Math.min(8, t[0].length + 1)));
      word(group, NAME - 10, mid, name, "text", "end", 11.5);
      if (t[0]) word(group, 0, mid, brief(t[0], room - name.length - 1), "muted");
      if (OP) word(group, NAME, mid, cut(operator(i).replace("aten::", ""), 18), "muted");
      for (let r = 0; r < R; ++r) {
        const of = make("g", {class: "s" + d.runs[r].color}, group), y = rowHeight / 2 + 11 * (r - (R - 1) / 2);
        for (const p of panels) {
          const s = row(r, i, p.dir);
          if (!s) continue;
          marks(of, p, r, i, s, y);
          if (p.std) word(of, p.left + p.wide + p.std - 8, y + 3.5, s.bad > 0 ? "NaN, inf" : short(s.std === null ? null : +s.std.toPrecision(3)), "area", "end", 10.5);
          const lost = s.bad > 0 && !p.std ? "NaN, inf" : s.loss >= 0.0005 ? share(s.loss) : "";
          if (lost) word(of, p.left + p.wide + p.std + p.loss - 8, y + 3.5, lost, "area", "end", 10.5);
        }
      }
      group.addEventListener("click", () => { chosen = i; draw(); tell(); });
    }
    space.append(picture);
  };

  // Over the steps.
  const course = (target, {height, powers = true, at}, series) => plot(target, {curves: d.runs.map((run, r) => {
    const steps = [], values = [];
    run.steps.forEach((step, k) => {
      const v = series(r, k);
      if (v !== null) { steps.push(step); values.push(!powers ? v : lg(v) === null ? NaN : lg(v)); }
    });
    return {name: run.name, color: run.color, x: steps, y: values};
  }), x_label: "step", height, smooth: 1, log: false, at}, {tools: false, powers});

  const table = (caption, names, lines) => {
    const wide = html("div", "", detail, "wide"), out = html("table", "", wide);
    html("caption", caption, out);
    const top = html("tr", "", html("thead", "", out)), body = html("tbody", "", out);
    for (const name of names) html("th", name, top).style.padding = "4px 10px";
    for (const line of lines) { const tr = html("tr", "", body); for (const text of line) html("td", text, tr); }
  };
  const tell = () => {
    if (chosen < 0) return;
    const i = chosen, t = d.tensors[i], facts = [], losses = [], bars = [[], []];
    detail.replaceChildren();
    detail.hidden = false;
    html("h4", (t[0] ? t[0] + "  " : "") + t[1] + (t[3].length ? `  [${t[3].join(", ")}]` : ""), detail);
    d.runs.forEach((run, r) => keys.forEach((key, dir) => {
      const s = row(r, i, dir);
      if (!s) return;
      const what = [run.name + (run.parts[i] ? ", " + run.parts[i] : ""), dir ? "gradient" : "value"];
      facts.push([...what, run.operators[i], s.step, short(s.std), short(s.mean_abs), short(s.abs_max), short(s.abs_min), share(s.zero), short(s.bad)]);
      d.formats.forEach((f, g) => { if (!isNaN(s.shares[g][0])) losses.push([...what, f.name, ...s.shares[g].map(v => share(v))]); });
      const found = exponents(r, i, dir, s.k).map(([e, part]) => [e, Math.round(part * t[2])]);
      if (found.length) bars[dir].push({run: run.name, color: run.color, numel: t[2], exponents: found});
    }));
    table("", ["run", "of", "operator", "at step", "std", "mean |x|", "max |x|", "min |x|", "zero", "NaN, inf"], facts);
    if (losses.length) table("What a format would do to it", ["run", "of", "format", "becomes 0", "loses digits", "too large"], losses);
    const pictures = html("div", "", detail, "panels");
    keys.forEach((key, dir) => {
      if (bars[dir].length) {
        const panel = html("div", "", pictures), f = band(dir);
        html("div", `${key}: share of elements by power of two` + (f ? `, against ${f.name}` : ""), panel);
        histogram(panel, bars[dir], f);
      }
      if (steps.length > 1 && d.runs.some((_, r) => (row(r, i, dir) || {std: null}).std !== null)) {
        const panel = html("div", "", pictures);
        html("div", `${key}: standard deviation over the steps`, panel);
        course(panel, {height: 170, at: steps[+slider.value]}, (r, k) => { const s = at(r, i, dir, k, -1); return s && s.std; });
      }
    });
  };

  // A layer: its tensors together. A small picture each, all with the same runs.
  const layers = one(".layers"), what = one(".layer-what"), which = one(".layer-which");
  const single = ["std", "abs_max", "loss"];  // statistic of a tensor that each fact of a layer is made of
  const facts = {"std": (all, of) => Math.sqrt(all.reduce((sum, s, n) => sum + of[n] * s.std ** 2, 0) / of.reduce((a, b) => a + b, 0)),
    "largest": all => Math.max(...all.map(s => s.abs_max)), "lost by the worst": all => Math.max(...all.map(s => s.loss))};
  // Whether fact number `w` was measured of tensor i in any step.
  const known = (i, w, dir) => d.runs.some((run, r) => run.steps.some((_, k) => { const s = at(r, i, dir, k, format(dir)); return s && Number.isFinite(s[single[w]]); }));
  const of_kind = n => d.tensors.map((_, i) => i).filter(i => (operator(i) === "parameter") === n > 1);
  const spread = () => {
    const groups = new Map(), n = which.selectedIndex, dir = n % 2, w = what.selectedIndex, get = facts[what.value];
    of_kind(n).forEach(i => {
      const t = d.tensors[i];
      if (!known(i, w, dir)) return;
      groups.has(t[4]) ? groups.get(t[4]).push(i) : groups.set(t[4], [i]);
    });
    layers.replaceChildren();
    [...groups].slice(0, 96).forEach(([layer, tensors]) => {
      const panel = html("div", "", layers);
      html("h4", layer || "the model itself", panel);
      course(panel, {height: 130, powers: what.value !== "lost by the worst"}, (r, k) => {
        const found = tensors.map(i => [at(r, i, dir, k, format(dir)), d.tensors[i][2]]).filter(([s]) => s && Number.isFinite(s[single[w]]));
        return found.length ? get(found.map(f => f[0]), found.map(f => f[1])) : null;
      });
    });
  };
  const refresh = () => {
    output.textContent = steps[+slider.value];
    arrange();
    tell();
  };
  const courses = one(".courses");
  courses.hidden = steps.length < 2;
  if (steps.length > 1) {
    for (const name of Object.keys(facts)) if (F || name !== "lost by the worst") html("option", name, what);
    for (const name of ["values", "gradients", "weights", "gradients of weights"]) html("option", name, which);
    // What was not measured cannot be chosen; the first that was is shown.
    const offer = () => {
      const has = [...what.options].map((_, w) => [...which.options].map((_, n) => of_kind(n).some(i => known(i, w, n % 2))));
      [...what.options].forEach((option, w) => { option.disabled = !has[w].some(h => h); });
      if (what.selectedOptions[0].disabled) what.selectedIndex = Math.max(0, [...what.options].findIndex(option => !option.disabled));
      [...which.options].forEach((option, n) => { option.disabled = !has[what.selectedIndex][n]; });
      if (which.selectedOptions[0].disabled) which.selectedIndex = Math.max(0, [...which.options].findIndex(option => !option.disabled));
      courses.hidden = !has.flat().some(h => h);
    };
    what.onchange = which.onchange = () => { offer(); spread(); };
    offer();
    spread();
  }
  slider.max = steps.length - 1;
  slider.value = slider.max;
  slider.oninput = refresh;
  slider.parentNode.hidden = steps.length < 2;
  search.oninput = lossy.onchange = arrange;
  side.onchange = () => { place(W); arrange(); };
  scroll.addEventListener("scroll", draw);
  fitted(scroll, width => { place(width); refresh(); });
}

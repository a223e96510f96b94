// Curves over steps: smoothing, a log axis, zoom by dragging, hovering, curves switched off by their names.
const tick_step = (low, high, count) => {
  const rough = (high - low) / Math.max(1, count), tens = 10 ** Math.floor(Math.log10(rough));
  return rough > 0 && isFinite(tens) && tens ? [1, 2, 5, 10].map(m => m * tens).find(s => s >= rough * 0.999) : 0;
};
const ticks = (low, high, count) => {
  const step = tick_step(low, high, count), out = [];
  if (!step) return [low];
  for (let i = 0, t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9 && i < 40; ++i, t += step) out.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return out;
};
// The mean over about the last `window` of x: weights fall off as exp(-2 d / window), which have the mean age of a plain
// mean of that many, and are divided by their own sum, so that no step shows where the first values drop out. What is not
// finite breaks the line and counts in no mean.
const smoothed = (x, y, window) => {
  if (window < 2) return y;
  const out = new Float64Array(y.length);
  let sum = 0, weights = 0;
  for (let i = 0; i < y.length; ++i) {
    const fade = i ? Math.exp(-2 * (x[i] - x[i - 1]) / window) : 0;
    sum *= fade;
    weights *= fade;
    if (isFinite(y[i])) { sum += y[i]; ++weights; }
    out[i] = isFinite(y[i]) ? sum / weights : NaN;
  }
  return out;
};
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (low < high) { const mid = low + high >> 1; xs[mid] < x ? low = mid + 1 : high = mid; }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
};

// d: {curves: [{name, color, dashed, x, y}], x_label, y_label, height, log, smooth}, x ascending. `powers`: y holds
// exponents of two. `at`: a step that is marked. Returns a function that draws it again after a change of d.
const plot = (target, d, {tools = true, powers = false} = {}) => {
  const off = new Set(), holder = html("div", "", null, "plot");
  let log = d.log, smooth = d.smooth, from = -Infinity, to = Infinity, lines = [], view = null, width = 0;
  const whole = html("button", "whole course", null, "more");
  if (tools) {
    const labels = html("div", "", target, "names"), bar = html("div", "", target, "tools");
    d.curves.forEach((curve, i) => {
      const twin = d.curves.slice(0, i).find(other => other.y.length === curve.y.length
        && other.y.every((v, k) => (v === curve.y[k] || isNaN(v) && isNaN(curve.y[k])) && other.x[k] === curve.x[k]));
      const button = html("button", "", labels, `s${curve.color}` + (curve.dashed ? " dashed" : ""));
      button.type = "button";
      button.append(html("i"), curve.name + (twin ? ` (equal to ${twin.name} at every ${d.x_label})` : ""));
      button.setAttribute("aria-pressed", true);
      button.onclick = () => {
        off.has(i) ? off.delete(i) : off.add(i);
        button.setAttribute("aria-pressed", !off.has(i));
        draw();
      };
    });
    const longest = Math.max(2, ...d.curves.map(curve => curve.y.length));
    const smoother = html("label", "mean of about ", bar), range = html("input", "", smoother), shown = html("output", smooth, smoother);
    smoother.append(" " + d.x_label + "s");
    Object.assign(range, {type: "range", min: 1, max: Math.max(2, Math.min(500, longest >> 2)), value: smooth});
    smoother.hidden = longest < 8;
    range.oninput = () => { smooth = +range.value; shown.textContent = smooth; renew(); };
    const logger = html("label", "", bar), check = html("input", "", logger);
    logger.append(" log axis");
    Object.assign(check, {type: "checkbox", checked: log});
    logger.hidden = powers || !d.curves.some(curve => curve.y.some(v => v > 0));
    check.onchange = () => { log = check.checked; draw(); };
    whole.type = "button";
    whole.onclick = () => { from = -Infinity; to = Infinity; draw(); };
    bar.append(whole);
    html("span", `drag to zoom`, bar, "count");
  }
  target.append(holder);
  const position = v => log ? (v > 0 ? Math.log10(v) : NaN) : v;
  const renew = () => { lines = d.curves.map(curve => smoothed(curve.x, curve.y, smooth)); draw(); };

  // Keeps the least and the largest of many points in each column of pixels, so that peaks stay.
  const path = (x, y, px, py, low, high) => {
    const out = [], thin = high - low > 3 * width;
    let pen = false, column = NaN, least = NaN, most = NaN;
    const flush = () => {
      if (isNaN(least)) return;
      out.push(`${pen ? "L" : "M"}${column} ${py(least).toFixed(1)}` + (most > least ? `L${column} ${py(most).toFixed(1)}` : ""));
      pen = true;
      least = most = NaN;
    };
    for (let i = low; i <= high; ++i) {
      const v = position(y[i]);
      if (!isFinite(v)) { flush(); pen = false; continue; }
      const c = thin ? Math.round(px(x[i])) : +px(x[i]).toFixed(1);
      if (c !== column || !thin) { flush(); column = c; }
      least = isNaN(least) ? v : Math.min(least, v);
      most = isNaN(most) ? v : Math.max(most, v);
      // A lone point is drawn by the line's round ends.
      if (!pen && !isFinite(position(y[i + 1]))) { flush(); out.push("h0"); }
    }
    flush();
    return out.join("");
  };
  const draw = () => {
    if (!width) return;
    holder.replaceChildren();
    const height = d.height, left = powers ? 40 : 56, right = width - 14, top = 8, base = height - (d.x_label && tools ? 40 : 22);
    const shown = d.curves.map((_, i) => i).filter(i => !off.has(i) && d.curves[i].x.length);
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const i of shown) { x0 = Math.min(x0, d.curves[i].x[0]); x1 = Math.max(x1, d.curves[i].x[d.curves[i].x.length - 1]); }
    x0 = Math.max(x0, from);
    x1 = Math.min(x1, to);
    const spans = shown.map(i => {
      const xs = d.curves[i].x;
      let low = nearest(xs, x0), high = nearest(xs, x1);
      // One point more on either side, so that lines reach the edge.
      low = Math.max(0, low - 1);
      high = Math.min(xs.length - 1, high + 1);
      for (let k = low; k <= high; ++k) {
        const v = position(lines[i][k]);
        if (isFinite(v) && xs[k] >= x0 && xs[k] <= x1) { y0 = Math.min(y0, v); y1 = Math.max(y1, v); }
      }
      return {i, low, high};
    });
    if (!(x0 < x1)) { x0 = isFinite(x0) ? x0 - 0.5 : 0; x1 = x0 + 1; }
    if (!(y0 <= y1)) { y0 = 0; y1 = 1; }
    const margin = y1 > y0 ? 0 : log || powers || y0 === 0 ? 0.5 : Math.abs(y0) * 0.5;
    y0 -= margin;
    y1 += margin;
    if (!isFinite(y1 - y0)) { y0 = -1; y1 = 1; }
    // The axis ends at marks that hold all there is.
    const room = Math.max(2, Math.round((base - top) / (powers ? 34 : 50))), decades = [];
    for (let e = Math.floor(y0); e <= y1 + 1; ++e) for (const m of y1 - y0 > 3 ? [1] : [1, 2, 5]) decades.push(e + Math.log10(m));
    const below = decades.filter(m => m <= y0 + 1e-9).pop(), above = decades.find(m => m >= y1 - 1e-9);
    const inside = decades.filter(m => m >= below && m <= above);
    let marks = inside;
    if (powers || !log || inside.length < 3 || inside.length > 14) {
      let step = tick_step(y0, y1, room);
      if (powers && step < 1 && y1 - y0 > 1) step = 1;
      if (step) { y0 = Math.floor(y0 / step + 1e-9) * step; y1 = Math.ceil(y1 / step - 1e-9) * step; }
      marks = step ? Array.from({length: Math.min(60, Math.round((y1 - y0) / step) + 1)}, (_, i) => y0 + i * step) : [y0];
      marks = marks.map(m => Math.abs(m) < step * 1e-9 ? 0 : m);
    } else { y0 = below; y1 = above; }
    const px = x => left + (x - x0) / (x1 - x0) * (right - left), py = v => base - (v - y0) / (y1 - y0) * (base - top);
    const svg = make("svg", {width, height, viewBox: `0 0 ${width} ${height}`, "font-size": 11}, holder);
    let digits = 2;  // as many as tell marks between powers of two apart
    while (powers && digits < 7 && new Set(marks.map(m => (2 ** m).toPrecision(digits) / 1)).size < marks.length) ++digits;
    for (const m of marks) {
      make("line", {class: "grid", x1: left, x2: right, y1: py(m), y2: py(m)}, svg);
      if (powers && Number.isInteger(m)) power(svg, left - 5, py(m) + 4, m, "end");
      else if (powers) word(svg, left - 5, py(m) + 4, String(+(2 ** m).toPrecision(digits)), "muted", "end");
      else word(svg, left - 6, py(m) + 4, short(+(log ? 10 ** m : m).toPrecision(6)), "muted", "end");
    }
    // The first and the last step, and round ones between.
    const ends = [from === -Infinity ? x0 : NaN, to === Infinity ? x1 : NaN].filter(x => !isNaN(x));
    const between = ticks(x0, x1, Math.max(2, Math.round((right - left) / 90)));
    for (const x of [...ends, ...between.filter(x => ends.every(end => Math.abs(px(x) - px(end)) > 40))]) {
      const text = short(x), half = 3.3 * text.length;
      make("line", {class: "axis", x1: px(x), x2: px(x), y1: base, y2: base + 4}, svg);
      word(svg, Math.min(px(x), width - half), base + 16, text, "muted", "middle");
    }
    make("line", {class: "axis", x1: left, x2: right, y1: base, y2: base}, svg);
    if (tools) word(svg, (left + right) / 2, height - 4, d.x_label, "muted", "middle", 12);
    if (d.y_label) word(svg, left + 4, top + 11, d.y_label, "muted", "start", 12);
    // An inner picture cuts off what lies beyond.
    const inner = make("svg", {x: left, y: 0, width: right - left, height: base, viewBox: `${left} 0 ${right - left} ${base}`}, svg);
    const style = {class: "line", fill: "none", "stroke-linejoin": "round", "stroke-linecap": "round"};
    const near = ([a, b]) => {  // most of b lies on a
      const xs = d.curves[b.i].x;
      let on = 0, n = 0;
      for (let k = b.low; k <= b.high; k += Math.ceil((b.high - b.low + 1) / 200)) {
        const u = py(position(lines[b.i][k])), v = py(position(lines[a.i][nearest(d.curves[a.i].x, xs[k])]));
        if (isFinite(u)) { ++n; on += Math.abs(u - v) < 1.6; }
      }
      return n > 0 && on > 0.8 * n;
    };
    for (const a of spans) {
      const {i, low, high} = a, curve = d.curves[i], group = make("g", {class: `curve s${curve.color}`, "data-curve": i}, inner);
      if (smooth > 1) make("path", {...style, d: path(curve.x, curve.y, px, py, low, high), "stroke-width": 1, opacity: .2}, group);
      // What a later line would hide stands out below it.
      const under = spans.some(b => b.i > i && near([a, b]));
      make("path", {...style, d: path(curve.x, lines[i], px, py, low, high), "stroke-width": under ? 7 : 2, opacity: under ? .45 : 1,
        ...(curve.dashed && !under ? {"stroke-dasharray": "7 4"} : {})}, group);
      for (let k = low; tools && high - low < 8 && k <= high; ++k) {  // a line through few points may be too short to see
        const v = position(lines[i][k]);
        if (isFinite(v)) make("circle", {class: "area", cx: px(curve.x[k]), cy: py(v), r: 3}, group);
      }
      let last = curve.y.length;
      while (last > 0 && !isFinite(curve.y[last - 1])) --last;
      if (last < curve.y.length) {
        const cx = Math.max(left + 6, Math.min(right - 6, px(curve.x[last]))), level = last ? py(position(lines[i][last - 1])) : 12;
        const cy = isFinite(level) ? Math.max(top + 8, Math.min(base - 8, level)) : 12;
        const cross = make("path", {class: "line", "stroke-width": 2.5, d: `M${cx - 5} ${cy - 5}l10 10m0 -10l-10 10`}, group);
        make("title", {}, cross).textContent = `${curve.name}: not finite from ${d.x_label} ${short(curve.x[last])} on`;
      }
    }
    if (d.at !== undefined && d.at >= x0 && d.at <= x1) make("line", {class: "cursor", x1: px(d.at), x2: px(d.at), y1: top, y2: base}, svg);
    whole.hidden = from === -Infinity && to === Infinity;
    view = {svg, px, py, x0, x1, left, right, top, base, shown,
      cursor: make("line", {class: "cursor", y1: top, y2: base, visibility: "hidden"}, svg), dots: make("g", {}, svg), chosen: null};
  };

  const x_of = e => {
    const at = e.clientX - view.svg.getBoundingClientRect().left;
    return view.x0 + (Math.max(view.left, Math.min(view.right, at)) - view.left) / (view.right - view.left) * (view.x1 - view.x0);
  };
  let start = null;
  const hide = () => { tip.hidden = true; if (view) { view.cursor.setAttribute("visibility", "hidden"); view.dots.replaceChildren(); } };
  holder.addEventListener("pointerdown", e => { if (view && e.button === 0) { start = x_of(e); e.preventDefault(); } });
  holder.addEventListener("pointerleave", () => { hide(); if (view && view.chosen) view.chosen.remove(); start = null; });
  holder.addEventListener("dblclick", () => whole.onclick && whole.onclick());
  holder.addEventListener("pointerup", e => {
    if (start === null) return;
    const [a, b] = [start, x_of(e)].sort((p, q) => p - q);
    start = null;
    if (view.px(b) - view.px(a) > 8) { from = a; to = b; hide(); draw(); }
    else if (view.chosen) view.chosen.remove();
  });
  holder.addEventListener("pointermove", e => {
    if (!view) return;
    const x = x_of(e), found = [];
    if (start !== null) {
      if (!view.chosen) view.chosen = make("rect", {class: "chosen", y: view.top, height: view.base - view.top}, view.svg);
      view.chosen.setAttribute("x", view.px(Math.min(start, x)));
      view.chosen.setAttribute("width", Math.abs(view.px(x) - view.px(start)));
    }
    view.dots.replaceChildren();
    for (const i of view.shown) {
      const curve = d.curves[i], k = nearest(curve.x, x), v = lines[i][k];
      // A curve that ends before has nothing to say here.
      if (Math.abs(view.px(curve.x[k]) - view.px(x)) > 12 && Math.abs(curve.x[k] - x) > (view.x1 - view.x0) / 50) continue;
      found.push([isFinite(v) ? v : null, curve.name, curve.x[k]]);
      const y = view.py(position(v));
      if (isFinite(y)) make("circle", {class: "area", cx: view.px(curve.x[k]), cy: y, r: 3.5}, make("g", {class: `s${curve.color}`}, view.dots));
    }
    if (!found.length) return hide();
    found.sort((a, b) => (b[0] === null ? Infinity : b[0]) - (a[0] === null ? Infinity : a[0]) || 0);
    for (const side of ["x1", "x2"]) view.cursor.setAttribute(side, view.px(x));
    view.cursor.setAttribute("visibility", "visible");
    const value = v => v === null ? "not finite" : powers ? "2^" + v.toFixed(1) : short(v), wide = Math.max(...found.map(f => value(f[0]).length));
    show(`${d.x_label} ${short(found[0][2])}\n` + found.map(f => `${value(f[0]).padStart(wide)}  ${f[1]}`).join("\n"), e.clientX, e.clientY);
  });
  lines = d.curves.map(curve => smoothed(curve.x, curve.y, smooth));
  fitted(holder, now => { width = now; draw(); });
  return renew;
};

for (const figure of all(".line-chart")) {
  const d = data(figure);
  for (const curve of d.curves) {
    curve.y = new Float32Array(bytes(curve.y));
    curve.x = curve.x ? new Float64Array(bytes(curve.x)) : Float64Array.from(curve.y, (_, i) => i);
  }
  plot(figure, d);
}

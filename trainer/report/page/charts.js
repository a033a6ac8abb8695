"use strict";
// Charts for the reports, in SVG. Text from a run is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(made.style, value);
    else if (key in made && typeof value !== "string") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function color(name) {
  return `var(--${name})`;
}

function addCard(grid, fill, wide) {
  const card = element("section", { class: wide ? "card wide" : "card" });
  grid.append(card);
  fill(card);
}

function addPairs(grid, fills) {
  // Two in a row; the last one of an odd number has a row of its own.
  fills.forEach((fill, at) => addCard(grid, fill, at % 2 === 0 && at === fills.length - 1));
}

function table(names, rows) {
  const cell = (kind, value, isNumber) => value instanceof Node ? element(kind, {}, value)
    : element(kind, { class: isNumber ? "number" : "" }, value);
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...names.map(([name, isNumber]) => cell("th", name, isNumber)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((value, at) => cell("td", value, names[at][1])))))));
}

// ---- numbers ----

function compact(value) {
  // For axes and figures: 1.5k, 2M.
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [factor, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= factor) return trimmed(value / factor, 3) + letter;
  }
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : trimmed(value, 3);
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

function precise(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3);
  return size >= 1000 ? count(value) : trimmed(value, 5);
}

function percent(value) {
  return value === null || value === undefined ? "–" : trimmed(value * 100, 3) + " %";
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return trimmed(seconds, 2) + " s";
  if (seconds < 60) return Math.round(seconds) + " s";
  let minutes = Math.floor(seconds / 60);
  if (minutes < 60) return minutes + " min " + Math.floor(seconds % 60) + " s";
  const hours = Math.floor(minutes / 60);
  minutes %= 60;
  return hours < 48 ? hours + " h " + minutes + " min" : Math.floor(hours / 24) + " d " + (hours % 24) + " h";
}

function bytes(value) {
  // As the terminal writes them.
  if (value === null || value === undefined) return "–";
  if (value < 2 ** 20) return Math.round(value / 2 ** 10) + " KiB";
  return value < 2 ** 30 ? Math.round(value / 2 ** 20) + " MiB" : (value / 2 ** 30).toFixed(2) + " GiB";
}

function ticks(low, high, most) {
  const raw = (high - low) / Math.max(most, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= raw * 0.999) || power * 10;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of [1, 2, 5]) {
      const value = digit * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length >= 2 ? found : ticks(low, high, 4);
}

function numbers(values) {
  return (values || []).filter((value) => value !== null && Number.isFinite(value));
}

function quantile(values, share) {
  const sorted = numbers(values).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.round(share * (sorted.length - 1))] : null;
}

function smoothed(steps, values, width) {
  // Mean over neighbours with weights of a bell curve; `width` is its standard deviation in steps.
  if (!(width > 0)) return values;
  let first = 0;
  return values.map((value, at) => {
    while (steps[at] - steps[first] > 3 * width) first++;
    let sum = 0, weights = 0;
    for (let other = first; other < values.length && steps[other] - steps[at] <= 3 * width; other++) {
      if (values[other] === null) continue;
      const weight = Math.exp(-0.5 * ((steps[other] - steps[at]) / width) ** 2);
      sum += weight * values[other];
      weights += weight;
    }
    return weights && value !== null ? sum / weights : null;
  });
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return high < 0 || step - steps[low] <= steps[high] - step ? low : high;
}

// ---- one crosshair for all charts of the page ----

const charts = new Set();

function pointAt(step, source) {
  for (const chart of charts) chart.show(step, chart === source);
}

function tip(card) {
  const box = element("div", { class: "tip", role: "status" });
  card.append(box);
  return {
    hide() { box.style.visibility = "hidden"; },
    show(title, rows, x, y) {
      box.replaceChildren(element("div", { class: "title" }, title));
      for (const row of rows) {
        const color = row.color ? element("span", { style: { color: row.color } }, row.label) : element("span", {}, row.label);
        box.append(element("div", { class: row.soft ? "range" : "" }, color, element("b", {}, row.value)));
      }
      const room = card.clientWidth, width = box.offsetWidth;
      box.style.left = Math.max(4, x + 14 + width > room ? x - width - 14 : x + 14) + "px";
      box.style.top = y + "px";
      box.style.visibility = "visible";
    },
  };
}

function key(kind, color, label) {
  const mark = element("i", { class: kind, style: kind === "dash" ? { borderColor: color } : { background: color } });
  return element("span", { class: "key" }, mark, label);
}

function lossControls(choices, draw) {
  // Sets `smooth`, in thousandths of the steps shown, and `log`.
  const slider = element("input", { type: "range", min: "0", max: "60", value: String(choices.smooth), "aria-label": "smoothing" });
  const log = element("input", { type: "checkbox" });
  log.checked = choices.log;
  slider.addEventListener("input", () => { choices.smooth = Number(slider.value); draw(); slider.focus(); });
  log.addEventListener("change", () => { choices.log = log.checked; draw(); log.focus(); });
  return [element("label", {}, "smoothing", slider), element("label", {}, log, "logarithmic")];
}

// A chart over steps. `spec`:
//   title, wide, height, format (of hover), axis (of ticks), log, zero (begin at 0), domain [first, last step]
//   unit   of the ticks: they are round multiples of it
//   lines  [{label, color, x, y, low, high, band (draw it), width, dash, dots, best (index), inTip}]
//   rules  [{y, label, color}]     lines across          stems [{x, color, label, value, size 0..1}]  at the bottom
//   flags  [{x, color, label, value}]  full height       keys  [{kind, color, label}]
//   controls  nodes beside the title
function drawChart(card, spec) {
  const head = element("div", { class: "head" }, element("h2", {}, spec.title));
  for (const each of spec.keys || []) head.append(key(each.kind, each.color, each.label));
  if (spec.controls) head.append(element("span", { class: "controls" }, ...spec.controls));
  const height = spec.height || 180;
  const svg = shape("svg", { height, role: "img", tabindex: "0", "aria-label": spec.title + " against the optimizer step" });
  card.replaceChildren(head, svg);
  const box = tip(card);
  let scale = null;

  function draw() {
    const width = Math.max(svg.clientWidth || card.clientWidth - 30, 120);
    scale = scales(spec, width, height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren(...frame(spec, scale, width, height), ...content(spec, scale, height));
    svg.append(scale.cross = shape("line", { class: "cross", y1: scale.top, y2: scale.bottom, visibility: "hidden" }));
  }

  const chart = {
    show(step, isSource) {
      if (!scale) return;
      const inside = step !== null && step >= scale.first && step <= scale.last;
      if (!inside) { scale.cross.setAttribute("visibility", "hidden"); box.hide(); return; }
      const x = scale.x(step);
      scale.cross.setAttribute("x1", x); scale.cross.setAttribute("x2", x); scale.cross.setAttribute("visibility", "visible");
      if (!isSource) { box.hide(); return; }
      const left = svg.offsetLeft + x * (svg.clientWidth / scale.width);
      box.show(stepTitle(spec, step), tipRows(spec, step, scale), left, svg.offsetTop + scale.top + 4);
    },
    forget() { watcher.disconnect(); charts.delete(chart); },
  };
  const stepOf = (event) => {
    const area = svg.getBoundingClientRect();
    const share = ((event.clientX - area.left) / area.width * scale.width - scale.left) / (scale.right - scale.left);
    const step = scale.first + share * (scale.last - scale.first);
    const base = longest(spec.lines);
    if (!base.x.length || share < -0.03 || share > 1.03) return null;
    return Math.min(Math.max(base.x[nearest(base.x, step)], scale.first), scale.last);
  };
  let step = null;
  svg.addEventListener("pointermove", (event) => pointAt(step = stepOf(event), chart));
  svg.addEventListener("pointerdown", (event) => pointAt(step = stepOf(event), chart));
  svg.addEventListener("pointerleave", () => pointAt(step = null, chart));
  svg.addEventListener("blur", () => pointAt(step = null, chart));
  svg.addEventListener("keydown", (event) => {
    const steps = longest(spec.lines).x;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !steps.length) return;
    event.preventDefault();
    const at = step === null ? (move > 0 ? 0 : steps.length - 1) : nearest(steps, step) + move;
    pointAt(step = steps[Math.min(Math.max(at, 0), steps.length - 1)], chart);
  });
  const watcher = new ResizeObserver(() => { if (!scale || Math.abs(svg.clientWidth - scale.width) > 1) draw(); });
  watcher.observe(svg);
  draw();
  charts.add(chart);
  return chart;
}

function longest(lines) {
  // Whose steps the crosshair stops at.
  return lines.reduce((best, line) => (line.x[line.x.length - 1] ?? -1) > (best.x[best.x.length - 1] ?? -1) ? line : best, { x: [] });
}

function scales(spec, width, height) {
  const [low, high] = range(spec);
  const stems = (spec.stems || []).length ? 20 : 0;
  const top = 8, bottom = height - 20 - stems;
  const unit = spec.unit || 1, most = Math.max(2, Math.floor((bottom - top) / 38));
  const marks = spec.log ? logTicks(low, high) : ticks(low / unit, high / unit, most).map((value) => value * unit);
  const longest = Math.max(...marks.map((value) => (spec.axis || compact)(value).length), 2);
  const left = 10 + longest * 6.4, right = width - 12;
  const [first, last] = spec.domain;
  const place = spec.log ? Math.log : (value) => value;
  const of = (value) => (place(Math.max(value, spec.log ? 1e-300 : -Infinity)) - place(low)) / ((place(high) - place(low)) || 1);
  return {
    width, top, bottom, left, right, first, last, low, high, marks, stems,
    x: (step) => left + (last > first ? (step - first) / (last - first) : 0.5) * (right - left),
    y: (value) => bottom - of(value) * (bottom - top),
  };
}

function range(spec) {
  // Rare extremes may leave the picture: otherwise one spike would flatten everything else.
  const low = [], high = [];
  for (const line of spec.lines) {
    const main = numbers(line.y);
    if (!main.length) continue;
    const keeps = line.keeps ?? 0.99, lows = line.band ? line.low : line.y, highs = line.band ? line.high : line.y;
    const least = Math.min(...numbers(lows)), most = Math.max(...numbers(highs));
    const usual = [quantile(lows, 1 - keeps), quantile(highs, keeps)];
    const spread = Math.max(usual[1] - usual[0], Math.abs(usual[1]) * 0.02);
    low.push(least < usual[0] - 0.5 * spread ? usual[0] - 0.1 * spread : least);
    high.push(most > usual[1] + 0.5 * spread ? usual[1] + 0.1 * spread : most);
  }
  let bottom = low.length ? Math.min(...low) : 0, top = high.length ? Math.max(...high) : 1;
  for (const rule of spec.rules || []) if (rule.y > bottom && rule.y <= top * 3) top = Math.max(top, rule.y);
  if (spec.zero) bottom = Math.min(0, bottom);
  if (spec.log) { bottom = bottom > 0 ? bottom : (quantile(spec.lines.flatMap((line) => numbers(line.y).filter((y) => y > 0)), 0) || 1e-6); }
  if (bottom === top) return spec.log ? [bottom / 2, top * 2] : [bottom - Math.abs(bottom || 1) * 0.05, top + Math.abs(top || 1) * 0.05];
  if (spec.log) return [bottom / 1.05, top * 1.05];
  const margin = (top - bottom) * 0.05;
  return [spec.zero && bottom === 0 ? 0 : bottom - margin, top + margin];
}

function frame(spec, scale, width, height) {
  const made = [];
  for (const value of scale.marks) {
    const y = scale.y(value);
    made.push(shape("line", { class: "gridline", x1: scale.left, x2: scale.right, y1: y, y2: y }));
    made.push(shape("text", { x: scale.left - 6, y: y + 4, "text-anchor": "end" }, (spec.axis || compact)(value)));
  }
  const whole = ticks(scale.first, scale.last, Math.max(2, Math.floor((scale.right - scale.left) / 80)));
  for (const step of whole.filter(Number.isInteger)) {
    const x = scale.x(step), anchor = x > scale.right - 14 ? "end" : "middle";
    made.push(shape("text", { x: Math.min(x, scale.right), y: height - 5, "text-anchor": anchor }, compactStep(step)));
  }
  made.push(shape("line", { class: "axis", x1: scale.left, x2: scale.right, y1: scale.bottom, y2: scale.bottom }));
  return made;
}

function compactStep(step) {
  return step >= 10000 ? compact(step) : String(step);
}

let clips = 0;

function content(spec, scale, height) {
  const id = "clip" + clips++;
  const clip = shape("clipPath", { id });
  clip.append(shape("rect", { x: scale.left - 9, y: scale.top - 8, width: scale.right - scale.left + 18, height: scale.bottom - scale.top + 10 }));
  const inside = shape("g", { "clip-path": `url(#${id})` });
  const made = [clip, inside];
  for (const flag of spec.flags || []) {
    const x = scale.x(flag.x);
    inside.append(shape("line", { x1: x, x2: x, y1: scale.top - 5, y2: scale.bottom, stroke: flag.color, "stroke-width": 1.2,
      "stroke-dasharray": flag.solid ? "none" : "5 4", opacity: 0.85 }));
    if (flag.solid) inside.append(shape("path", { d: `M${x - 4} ${scale.top - 5}h8l-4 7z`, fill: flag.color }));
  }
  for (const line of spec.lines) if (line.band) inside.append(shape("path", { d: band(line, scale), fill: line.color, opacity: 0.2 }));
  for (const rule of spec.rules || []) {
    if (rule.y > scale.high || rule.y < scale.low) continue;
    const y = scale.y(rule.y);
    inside.append(shape("line", { x1: scale.left, x2: scale.right, y1: y, y2: y, stroke: rule.color, "stroke-width": 1.3, "stroke-dasharray": "6 4" }));
  }
  for (const line of spec.lines) {
    const isShort = numbers(line.y).length < 3;
    if (!line.dots || line.x.length > 1) {
      inside.append(shape("path", { d: path(line, scale), fill: "none", stroke: line.color, "stroke-width": line.width || 1.6,
        "stroke-linejoin": "round", "stroke-linecap": "round", "stroke-dasharray": line.dash || "none", opacity: line.opacity || 1 }));
    }
    if ((line.dots && line.x.length <= 150) || isShort) {
      line.x.forEach((step, at) => line.y[at] !== null && inside.append(
        shape("circle", { cx: scale.x(step), cy: scale.y(line.y[at]), r: 2.6, fill: line.color })));
    }
    if (line.best !== undefined && line.best !== null) {
      const x = scale.x(line.x[line.best]), y = scale.y(line.y[line.best]);
      inside.append(shape("circle", { cx: x, cy: y, r: 6, fill: "none", stroke: line.color, "stroke-width": 2 }));
      const text = "best " + precise(line.y[line.best]), isLeft = x > scale.right - 90, isHigh = y < scale.top + 16;
      made.push(shape("text", { x: x + (isLeft ? 4 : -4), y: y + (isHigh ? 18 : -10), fill: line.color, class: "bestmark",
        "text-anchor": isLeft ? "end" : "start", "font-weight": "600" }, text));
    }
  }
  for (const stem of spec.stems || []) {
    const size = 3 + 13 * stem.size, y = height - 22;
    made.push(shape("rect", { x: scale.x(stem.x) - 1.5, y: y - size, width: 3, height: size, fill: stem.color, rx: 1 }));
  }
  return made;
}

function path(line, scale) {
  let d = "", pen = "M";
  line.y.forEach((value, at) => {
    if (value === null || (scale.log && value <= 0)) { pen = "M"; return; }
    d += pen + scale.x(line.x[at]).toFixed(1) + " " + scale.y(value).toFixed(1);
    pen = "L";
  });
  return d;
}

function band(line, scale) {
  let d = "", run = [];
  const close = () => {
    if (run.length) {
      d += "M" + run.map((at) => scale.x(line.x[at]).toFixed(1) + " " + scale.y(line.high[at]).toFixed(1)).join("L");
      d += "L" + run.reverse().map((at) => scale.x(line.x[at]).toFixed(1) + " " + scale.y(line.low[at]).toFixed(1)).join("L") + "Z";
    }
    run = [];
  };
  line.y.forEach((value, at) => { if (value === null || line.low[at] === null) close(); else run.push(at); });
  close();
  return d;
}

function stepTitle(spec, step) {
  const stride = spec.stride || 1;
  return stride > 1 ? `steps ${count(Math.max(step - stride + 1, 1))} to ${count(step)}` : `step ${count(step)}`;
}

function tipRows(spec, step, scale) {
  const rows = [], format = spec.format || precise, near = 7 * (scale.last - scale.first) / (scale.right - scale.left);
  for (const line of spec.lines) {
    if (line.inTip === false || !line.x.length) continue;
    const at = nearest(line.x, step);
    const isBeside = line.dots || step < line.x[0] || step > line.x[line.x.length - 1];
    if (Math.abs(line.x[at] - step) > near && isBeside) continue;
    if (rows.length >= 16) { rows.push({ label: "and more", value: "" }); break; }
    rows.push({ label: line.label, value: format(line.y[at]), color: line.color });
    if (line.low && line.low[at] !== null && line.low[at] !== line.high[at]) {
      rows.push({ label: "lowest, highest", value: format(line.low[at]) + ", " + format(line.high[at]), soft: true });
    }
  }
  for (const each of [...(spec.stems || []), ...(spec.flags || [])]) {
    if (Math.abs(each.x - step) <= near && rows.length < 12) rows.push({ label: each.label, value: each.value || "", color: each.color });
  }
  return rows;
}

// ---- heat maps ----

const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function ramp(share) {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1), low = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[low].map((value, channel) => Math.round(value + (RAMP[low + 1][channel] - value) * (at - low)));
}

// `spec`: title, rows [[value]] of each layer, layers (their numbers), x (steps), low and high of the colours, format
function drawHeatMap(card, spec) {
  const scaleBar = element("span", { class: "ramp", style: {
    background: "linear-gradient(90deg," + RAMP.map((color) => `rgb(${color})`).join(",") + ")" } });
  const head = element("div", { class: "head" }, element("h2", {}, spec.title),
    element("span", { class: "key" }, spec.format(spec.low), scaleBar, spec.format(spec.high)));
  const rowHeight = Math.max(5, Math.min(22, 220 / spec.rows.length)), height = Math.round(rowHeight * spec.rows.length);
  const canvas = element("canvas", { role: "img", "aria-label": spec.title + " of each layer against the optimizer step" });
  canvas.width = spec.x.length;
  canvas.height = spec.rows.length;
  canvas.style.height = height + "px";
  const pixels = canvas.getContext("2d"), image = pixels.createImageData(canvas.width, canvas.height);
  spec.rows.forEach((row, number) => row.forEach((value, at) => {
    const color = value === null ? [128, 128, 128, 60] : [...ramp((value - spec.low) / ((spec.high - spec.low) || 1)), 255];
    image.data.set(color, (number * canvas.width + at) * 4);
  }));
  pixels.putImageData(image, 0, 0);
  const named = Math.max(1, Math.ceil(spec.rows.length / Math.floor(height / 13)));
  const labels = element("div", { style: { position: "relative", width: "52px", flex: "none", height: height + "px" } },
    ...spec.layers.map((layer, number) => number % named ? null : element("span", { class: "soft", style: {
      position: "absolute", right: "8px", fontSize: "11px", lineHeight: "1", whiteSpace: "nowrap",
      top: rowHeight * (number + 0.5) - 5.5 + "px" } }, "layer " + layer)));
  const holder = element("div", { class: "heat", style: { flex: "1", minWidth: "0" } }, canvas);
  const body = element("div", { style: { display: "flex" } }, labels, holder);
  const ends = element("div", { class: "soft", style: { display: "flex", justifyContent: "space-between", fontSize: "11px", paddingLeft: "52px" } },
    element("span", {}, "step " + count(spec.x[0])), element("span", {}, "step " + count(spec.x[spec.x.length - 1])));
  card.replaceChildren(head, body, ends);
  const box = tip(card);
  canvas.addEventListener("pointermove", (event) => {
    const area = canvas.getBoundingClientRect();
    const at = Math.min(Math.floor((event.clientX - area.left) / area.width * spec.x.length), spec.x.length - 1);
    const row = Math.min(Math.floor((event.clientY - area.top) / area.height * spec.rows.length), spec.rows.length - 1);
    if (at < 0 || row < 0) return;
    pointAt(spec.x[at], null);
    const frame = card.getBoundingClientRect();
    box.show("step " + count(spec.x[at]), [{ label: "layer " + spec.layers[row], value: spec.format(spec.rows[row][at]) }],
      event.clientX - frame.left, event.clientY - frame.top + 12);
  });
  canvas.addEventListener("pointerleave", () => { pointAt(null, null); box.hide(); });
}

"use strict";
// Charts for the reports, drawn by uPlot. Text from a run is only ever set as text, never as markup.

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

// ---- charts ----

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

function ink(color) {
  // A canvas knows no variables of CSS.
  return getComputedStyle(document.documentElement).getPropertyValue(color.slice(4, -1)).trim();
}

const plots = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const plot of plots) plot.redraw(); });

// A chart over steps. `spec`:
//   title, height, format (of values), axis (of ticks), log, zero (begin at 0), domain [first, last step]
//   unit   of the ticks: they are round multiples of it
//   place, name, range  what x is in place of a step, the name of one, and [lowest, highest] y
//   lines  [{label, color, x, y, low, high, band (draw it), width, dash, dots, best (index), inLegend, opacity,
//           texts (x -> y in words)}]
//   rules  [{y, color}]     lines across          stems [{x, color, label, value, size 0..1}]  at the bottom
//   flags  [{x, color, label, value, solid}]  full height       keys  [{kind, color, label}]
//   controls  nodes beside the title
// All charts of a page show the step under the mouse.
function drawChart(card, spec) {
  const head = element("div", { class: "head" }, element("h2", {}, spec.title));
  for (const each of spec.keys || []) head.append(key(each.kind, each.color, each.label));
  const near = element("span", { class: "key near" });
  head.append(near);
  if (spec.controls) head.append(element("span", { class: "controls" }, ...spec.controls));
  card.replaceChildren(head);
  const width = () => Math.max(card.clientWidth - 28, 120);
  const plot = new uPlot(options(spec, width(), near), columnsOf(spec.lines), card);
  plots.add(plot);
  const watcher = new ResizeObserver(() => { if (Math.abs(width() - plot.width) > 1) plot.setSize({ width: width(), height: plot.height }); });
  watcher.observe(card);
  return { forget() { watcher.disconnect(); plots.delete(plot); plot.destroy(); } };
}

function columnsOf(lines) {
  // The columns of all lines over the steps of any of them.
  return lines.length ? uPlot.join(lines.map((line) => [line.x, line.y, ...(line.band ? [line.low, line.high] : [])])) : [[]];
}

function options(spec, width, near) {
  const format = spec.format || precise, axis = spec.axis || compact, series = [{ label: spec.place || "step", value: (plot, step) => stepTitle(spec, step) }];
  const bands = [], value = (plot, number) => number === undefined ? "–" : format(number);
  for (const line of spec.lines) {
    const stroke = () => ink(line.color), few = numbers(line.y).length < 3;
    series.push({
      label: line.label, value: line.texts ? (plot, number, at, point) => line.texts.get(plot.data[0][point]) || "–" : value, stroke,
      width: line.dots && line.x.length < 2 ? 0 : line.width || 1.6, dash: line.dash, alpha: line.opacity || 1,
      spanGaps: Boolean(line.dots), class: line.inLegend === false ? "quiet" : undefined, color: line.color,
      points: { show: few || Boolean(line.dots && line.x.length <= 150), size: 6, fill: stroke },
    });
    if (!line.band) continue;
    const edge = { value, stroke, width: 0, points: { show: false }, color: line.color };
    bands.push({ series: [series.length + 1, series.length], fill: () => ink(line.color) + "33" });
    series.push({ ...edge, label: "lowest" }, { ...edge, label: "highest" });
  }
  const text = { stroke: () => ink("var(--soft)"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((each) => each * (spec.unit || 1));
  return {
    width, height: spec.height || 180, series, bands,
    scales: { x: { time: false, auto: false, min: spec.domain[0], max: spec.domain[1] }, y: { distr: spec.log ? 3 : 1, range: () => spec.range || range(spec) } },
    axes: [
      { ...text, size: 22, grid: { show: false }, values: (plot, splits) => splits.map((step) => Number.isInteger(step) ? (spec.name || compactStep)(step) : "") },
      { ...text, space: 38, ...(spec.unit ? { incrs: steps } : {}), grid: { stroke: () => ink("var(--grid)"), width: 1 },
        size: (plot, values) => 14 + 6.4 * Math.max(2, ...(values || []).map((each) => (each || "").length)),
        values: (plot, splits) => splits.map((each) => each === null ? "" : axis(each)) },
    ],
    legend: { markers: { width: 0, fill: (plot, number) => series[number].color } },
    cursor: { sync: { key: "steps" }, y: false },
    hooks: { draw: [(plot) => drawMarks(plot, spec)], setCursor: [(plot) => { near.textContent = nearMarks(plot, spec); }] },
  };
}

function drawMarks(plot, spec) {
  const context = plot.ctx, box = plot.bbox, unit = uPlot.pxRatio;
  const x = (step) => plot.valToPos(step, "x", true), y = (value) => plot.valToPos(value, "y", true);
  const line = (color, dash, ...points) => {
    context.strokeStyle = ink(color);
    context.lineWidth = 1.3 * unit;
    context.setLineDash(dash.map((each) => each * unit));
    context.beginPath();
    points.forEach(([left, top], at) => at ? context.lineTo(left, top) : context.moveTo(left, top));
    context.stroke();
  };
  context.save();
  context.beginPath();
  context.rect(box.left, box.top, box.width, box.height);
  context.clip();
  for (const flag of spec.flags || []) line(flag.color, flag.solid ? [] : [5, 4], [x(flag.x), box.top], [x(flag.x), box.top + box.height]);
  for (const rule of spec.rules || []) line(rule.color, [6, 4], [box.left, y(rule.y)], [box.left + box.width, y(rule.y)]);
  for (const stem of spec.stems || []) {
    const size = (3 + 13 * stem.size) * unit;
    context.fillStyle = ink(stem.color);
    context.fillRect(x(stem.x) - 1.5 * unit, box.top + box.height - size, 3 * unit, size);
  }
  context.restore();
  for (const each of spec.lines) {
    if (each.best === undefined || each.best === null) continue;
    const left = x(each.x[each.best]), top = y(each.y[each.best]), isRight = left > box.left + box.width - 90 * unit;
    context.strokeStyle = context.fillStyle = ink(each.color);
    context.lineWidth = 2 * unit;
    context.beginPath();
    context.arc(left, top, 6 * unit, 0, 2 * Math.PI);
    context.stroke();
    context.font = `600 ${11 * unit}px system-ui, sans-serif`;
    context.textAlign = isRight ? "right" : "left";
    context.fillText("best " + precise(each.y[each.best]), left + (isRight ? 4 : -4) * unit, top + (top < box.top + 16 * unit ? 18 : -10) * unit);
  }
}

function nearMarks(plot, spec) {
  // What is marked at the step under the mouse, in words.
  if (plot.cursor.left < 0) return "";
  const near = [...(spec.stems || []), ...(spec.flags || [])].filter((each) => Math.abs(plot.valToPos(each.x, "x") - plot.cursor.left) <= 7);
  return near.slice(0, 3).map((each) => each.value ? `${each.label} ${each.value}` : each.label).join(", ");
}

function compactStep(step) {
  return step >= 10000 ? compact(step) : String(step);
}

function stepTitle(spec, step) {
  if (step === null || step === undefined) return "–";
  if (spec.name) return spec.name(step);
  const stride = spec.stride || 1;
  return stride > 1 ? `${count(Math.max(step - stride + 1, 1))} to ${count(step)}` : count(step);
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

// ---- heat maps ----

const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function ramp(share) {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1), low = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[low].map((value, channel) => Math.round(value + (RAMP[low + 1][channel] - value) * (at - low)));
}

// `spec`: title, rows [[value]] of each layer, layers (their numbers), x (steps), low and high of the colours, format
function drawHeatMap(card, spec) {
  const near = element("span", { class: "key near" });
  const scaleBar = element("span", { class: "ramp", style: {
    background: "linear-gradient(90deg," + RAMP.map((color) => `rgb(${color})`).join(",") + ")" } });
  const head = element("div", { class: "head" }, element("h2", {}, spec.title),
    element("span", { class: "key" }, spec.format(spec.low), scaleBar, spec.format(spec.high)), near);
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
  canvas.addEventListener("pointermove", (event) => {
    const area = canvas.getBoundingClientRect();
    const at = Math.min(Math.floor((event.clientX - area.left) / area.width * spec.x.length), spec.x.length - 1);
    const row = Math.min(Math.floor((event.clientY - area.top) / area.height * spec.rows.length), spec.rows.length - 1);
    if (at < 0 || row < 0) return;
    near.textContent = `step ${count(spec.x[at])}, layer ${spec.layers[row]}: ${spec.format(spec.rows[row][at])}`;
  });
  canvas.addEventListener("pointerleave", () => { near.textContent = ""; });
}

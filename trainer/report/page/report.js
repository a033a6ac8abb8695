"use strict";
// report.html: draws the data of one run. `data` is what trainer/report/page.py puts into the page.

const choices = { smooth: 15, log: false };

function render(data) {
  const main = document.getElementById("report");
  main.replaceChildren(
    ...heading(data),
    tiles(data),
    element("div", { class: "grid", id: "charts" }),
    footer(data),
  );
  document.title = data.title + " – " + stateOf(data);
  const grid = document.getElementById("charts");
  const add = (fill, wide) => addCard(grid, fill, wide);
  if (data.curves.steps.length || data.evaluations.length) {
    add((card) => lossChart(card, data), true);
    addPairs(grid, smallCharts(data).map((spec) => (card) => drawChart(card, spec)));
    for (const map of data.heat) add((card) => drawHeatMap(card, { ...map, format: map.percent ? percent : precise }), true);
    add((card) => timeCard(card, data), true);
  }
  if (data.checkpoints.length) add((card) => checkpointCard(card, data), true);
  if (data.samples.length) add((card) => sampleCard(card, data), true);
  add((card) => runCard(card, data), true);
  add((card) => settingsCard(card, data), true);
}

// ---- above the charts ----

function stateOf(data) {
  // A process that was killed has left a page that says it runs. The file is written every `interval` seconds, but a
  // step or a compilation may hold that up.
  const isOld = Date.now() / 1000 - data.written_at > 3 * data.interval + 30;
  return data.state === "running" && isOld ? "ended without a word" : data.state;
}

function heading(data) {
  const state = stateOf(data);
  const done = data.last_step ? Math.min(data.step / data.last_step, 1) : 0;
  const header = element("header", {}, element("h1", {}, data.title),
    element("span", { class: "state " + state.replaceAll(" ", "-") }, state));
  const steps = data.last_step > data.step ? `step ${count(data.step)} of ${count(data.last_step)}` : `${count(data.step)} steps`;
  const parts = [data.model, steps];
  if (state === "ended without a word") parts.push(`no news since ${data.written}: the run was killed, its machine is gone, or this is a copy of its report`);
  else if (state === "running" && data.left_seconds !== null) parts.push("about " + duration(data.left_seconds) + " left");
  else if (data.outcome && data.outcome !== data.state) parts.push(data.outcome);
  const bar = element("div", { class: "progress", title: percent(done) }, element("div", { style: { width: 100 * done + "%" } }));
  const notes = data.notes.map((each) => element("p", { class: "outcome soft" }, "note: " + each));
  return [header, element("p", { class: "outcome soft " + data.state }, parts.filter(Boolean).join(" · ")), ...notes, bar];
}

function tiles(data) {
  const loss = data.curves.fields.loss, best = data.best === null ? null : data.evaluations[data.best];
  const last = loss ? numbers(smoothed(data.curves.steps, loss.mean, smoothWidth(data))).pop() : undefined;
  const rate = data.input_tokens_per_second;
  const shown = [
    ["train loss", precise(last), "smoothed, at the end"],
    best && ["best eval loss", precise(best[1]), `at step ${count(best[0])}`],
    best && best[3] !== null && ["accuracy", percent(best[3]), "of the best evaluation"],
    rate && [data.labels + "/s", compact(rate), "median of the steps"],
    data.tokens && [data.labels, compact(data.tokens), "trained on"],
    data.peak_bytes && ["memory", bytes(data.peak_bytes), "highest resident"],
    ["time", duration(data.seconds), data.starts > 1 ? `in ${data.starts} starts` : "training"],
  ];
  return element("div", { class: "tiles" }, ...shown.filter(Boolean).map(([name, value, more]) =>
    element("div", { class: "tile" }, element("span", {}, name), element("b", {}, value), element("span", {}, more))));
}

function footer(data) {
  return element("footer", {}, element("span", {}, `run_trainer ${data.version}`), element("span", {}, `written ${data.written}`));
}

// ---- charts ----

function domain(data) {
  const steps = data.curves.steps, evaluated = data.evaluations.map((each) => each[0]);
  const first = Math.min(...steps.slice(0, 1), ...evaluated.slice(0, 1)) - (data.curves.stride - 1);
  return [Math.max(first, 0), Math.max(data.step, ...evaluated.slice(-1), first + 1)];
}

function smoothWidth(data) {
  const [first, last] = domain(data);
  return choices.smooth / 1000 * (last - first);
}

function series(data, name, more) {
  const found = data.curves.fields[name];
  return { label: more.label || name, color: color("train"), x: data.curves.steps, y: found.mean,
    low: found.low || found.mean, high: found.high || found.mean, band: Boolean(found.low), ...more };
}

function marks(data) {
  return data.resumes.map((step) => ({ x: step, color: color("accent"), label: "resumed after step " + count(step) }));
}

function resumeKey(data) {
  return data.resumes.length ? [{ kind: "dash", color: color("accent"), label: "resumed" }] : [];
}

function lossChart(card, data) {
  let chart = null;
  const draw = () => {
    if (chart) chart.forget();
    chart = drawChart(card, lossSpec(data, controls));
  };
  const controls = lossControls(choices, draw);
  draw();
}

function lossSpec(data, controls) {
  const { steps, fields, stride } = data.curves, lines = [], keys = [];
  if (fields.loss) {
    const raw = series(data, "loss", { label: "train loss" }), width = smoothWidth(data);
    if (raw.band || width > 0) {
      lines.push({ ...raw, width: 1, opacity: 0.5, band: raw.band });
      keys.push(raw.band ? { kind: "band", color: color("train"), label: `lowest to highest of ${count(stride)} steps` }
        : { kind: "band", color: color("train"), label: "each step" });
    }
    lines.push({ label: "smoothed", color: color("train"), x: steps, y: smoothed(steps, raw.y, width), width: 2, inLegend: width > 0, keeps: 1 });
    keys.push({ kind: "", color: color("train"), label: width > 0 ? "train, smoothed" : "train" });
  }
  if (data.evaluations.length) {
    const evaluated = data.evaluations;
    lines.push({ label: "eval loss", color: color("eval"), x: evaluated.map((each) => each[0]), y: evaluated.map((each) => each[1]),
      dots: true, width: 2, best: data.best, keeps: 0.98 });
    keys.push({ kind: "dot", color: color("eval"), label: "eval" });
  }
  return { title: data.loss_title, height: 300, domain: domain(data), stride, lines, keys: [...keys, ...resumeKey(data)],
    flags: marks(data), log: choices.log, controls };
}

const SMALL = {
  lr: { title: "learning rate", zero: true, axis: (value) => value === 0 ? "0" : value.toExponential(1).replace(".0e", "e") },
  global_norm: { title: "gradient norm", zero: true },
  input_tokens_per_second: { title: "tokens/s", zero: true },
  peak_rss_bytes: { title: "memory", zero: true, format: bytes },
  "rewards/chosen": { title: "rewards" },
  "rewards/margins": { title: "reward margin" },
  "rewards/accuracies": { title: "reward accuracy", zero: true, format: percent, axis: percent },
  mfu: { title: "model FLOPs utilization", zero: true, format: percent, axis: percent },
};

function smallCharts(data) {
  const made = [];
  for (const name of data.charts) {
    if (name === "rewards/rejected" && data.charts.includes("rewards/chosen")) continue; // in one chart
    const known = SMALL[name] || { title: name.replaceAll("_", " ") };
    const spec = { domain: domain(data), stride: data.curves.stride, lines: [series(data, name, { label: known.title, width: 1.4 })],
      keys: [], flags: [], ...known };
    if (name === "global_norm") normExtras(spec, data);
    if (name === "input_tokens_per_second") rateExtras(spec, data);
    if (name === "peak_rss_bytes") memoryExtras(spec, data);
    if (name === "rewards/chosen") rewardExtras(spec, data);
    if (name === "rewards/accuracies") evalDots(spec, data, 3);
    if (name === "rewards/margins") evalDots(spec, data, 4);
    spec.flags.push(...marks(data));
    made.push(spec);
  }
  return made;
}

function normExtras(spec, data) {
  if (data.clip !== null) {
    spec.rules = [{ y: data.clip, color: color("eval") }];
    spec.keys.push({ kind: "dash", color: color("eval"), label: "clipped at " + precise(data.clip) });
  }
  const skipped = data.skipped.map(([step, reason]) => ({ x: step, solid: true, color: color("bad"), label: "skipped", value: reason }));
  spec.flags.push(...skipped);
  if (data.skipped_count) {
    spec.keys.push({ kind: "tick", color: color("bad"), label: data.skipped_count === 1 ? "1 step skipped" : `${count(data.skipped_count)} steps skipped` });
  }
}

function rewardExtras(spec, data) {
  spec.lines[0].label = "chosen";
  spec.keys.push({ kind: "", color: color("train"), label: "chosen" });
  if (!data.curves.fields["rewards/rejected"]) return;
  spec.lines.push(series(data, "rewards/rejected", { label: "rejected", color: color("bad"), width: 1.4 }));
  spec.keys.push({ kind: "", color: color("bad"), label: "rejected" });
}

function evalDots(spec, data, place) {
  const evaluated = data.evaluations.filter((each) => each[place] !== null);
  if (!evaluated.length) return;
  spec.lines.push({ label: "eval", color: color("eval"), x: evaluated.map((each) => each[0]), y: evaluated.map((each) => each[place]),
    dots: true, width: 2 });
  spec.keys.push({ kind: "", color: color("train"), label: "train" }, { kind: "dot", color: color("eval"), label: "eval" });
}

function memoryExtras(spec, data) {
  spec.title = "memory (highest resident of the process)";
  const [unit, name] = data.peak_bytes < 2 ** 30 ? [2 ** 20, " MiB"] : [2 ** 30, " GiB"];
  spec.unit = unit;
  spec.axis = (value) => value === 0 ? "0" : trimmed(value / unit, 3) + name;
}

function rateExtras(spec, data) {
  spec.title = data.labels + "/s";
  const longest = Math.max(...data.pauses.map((pause) => pause[2]), 1e-9);
  spec.stems = data.pauses.map(([step, kind, seconds]) => ({ x: step, size: seconds / longest, color: color("pause-" + kind),
    label: "pause: " + kind, value: duration(seconds) }));
  for (const kind of ["evaluation", "sampling", "checkpoint"]) {
    if (data.pauses.some((pause) => pause[1] === kind)) spec.keys.push({ kind: "tick", color: color("pause-" + kind), label: "pause: " + kind });
  }
}

function timeCard(card, data) {
  const names = [["steps", color("train")], ["waiting for data", color("soft")], ["evaluation", color("pause-evaluation")],
    ["sampling", color("pause-sampling")], ["checkpoints", color("pause-checkpoint")]];
  const total = data.time.reduce((sum, seconds) => sum + seconds, 0) || 1;
  const parts = names.map(([name, shade], at) => [name, shade, data.time[at]]).filter((part) => part[2] > 0);
  card.append(
    element("div", { class: "head" }, element("h2", {}, "where the time went"), element("span", { class: "key" }, duration(total))),
    element("div", { class: "bar" }, ...parts.map(([name, shade, seconds]) =>
      element("div", { title: name, style: { background: shade, width: 100 * seconds / total + "%" } }))),
    element("div", { class: "keys head" }, ...parts.map(([name, shade, seconds]) =>
      key("dot", shade, `${name} ${duration(seconds)} (${percent(seconds / total)})`))));
}

// ---- tables ----

function checkpointCard(card, data) {
  const rows = data.checkpoints.map(([step, saved, size, loss, isBest]) => [count(step),
    isBest ? element("span", { class: "best" }, (loss === null ? "–" : precise(loss)) + " best") : element("span", {}, loss === null ? "–" : precise(loss)),
    bytes(size), saved, "checkpoints/step-" + String(step).padStart(8, "0")]);
  card.append(element("div", { class: "head" }, element("h2", {}, "checkpoints")),
    table([["step", true], ["eval loss"], ["size", true], ["saved"], ["folder"]], rows));
}

function sampleCard(card, data) {
  const made = data.samples.map(([title, prompt, text]) => element("div", {}, element("span", { class: "soft" }, title),
    element("pre", {}, element("span", { class: "prompt" }, prompt), text)));
  card.append(element("div", { class: "head" }, element("h2", {}, data.samples_title)), element("div", { class: "samples" }, ...made));
}

function runCard(card, data) {
  const body = element("tbody", {}, ...data.facts.map(([name, value, isCode]) => element("tr", {}, element("th", {}, name),
    element("td", { class: "word" }, isCode ? element("code", {}, value) : value))));
  card.append(element("div", { class: "head" }, element("h2", {}, "the run")), element("div", { class: "scroll" }, element("table", {}, body)));
}

function settingsCard(card, data) {
  const rows = data.settings.map(([name, value]) => element("div", { class: "mono" }, element("span", {}, name), element("span", {}, value)));
  card.append(element("div", { class: "head" }, element("h2", {}, data.settings_title)), element("div", { class: "settings" }, ...rows));
}

render(JSON.parse(document.getElementById("data").textContent));

"use strict";
// compare.html: the curves of several runs over each other. `data` is what trainer/report/compare_page.py puts into the page.

const COLORS = 9;
const choices = { smooth: 15, log: false, hidden: new Set() };

function runColor(number) {
  return color("run-" + number % COLORS);
}

function render(data) {
  const [figures, ...tables] = data.tables;
  const grid = element("div", { class: "grid", id: "charts" });
  document.getElementById("report").replaceChildren(
    element("header", {}, element("h1", {}, data.title)), grid,
    element("footer", {}, element("span", {}, `run_trainer ${data.version}`), element("span", {}, `written ${data.written}`)));
  addCard(grid, (card) => tableCard(card, figures), true);
  if (data.charts.length) addCard(grid, (card) => legendCard(card, data), true);
  const [first, ...others] = data.charts.map((chart) => (card) => chartCard(card, data, chart));
  if (first) addCard(grid, first, true);
  addPairs(grid, others);
  for (const each of tables) addCard(grid, (card) => tableCard(card, each), true);
}

function tableCard(card, { title, header, rows }) {
  card.append(element("div", { class: "head" }, element("h2", {}, title)), table(header.map((name) => [name]), rows));
}

const drawn = [];

function legendCard(card, data) {
  const keys = data.names.map((name, number) => {
    const box = element("input", { type: "checkbox" });
    box.checked = true;
    box.addEventListener("change", () => {
      if (box.checked) choices.hidden.delete(number); else choices.hidden.add(number);
      for (const draw of drawn) draw();
    });
    const mark = element("i", { style: { background: runColor(number) } });
    return element("label", { class: "key" }, box, mark, name);
  });
  card.append(element("div", { class: "head legend" }, ...keys));
}

function chartCard(card, data, chart) {
  let made = null;
  const draw = () => {
    if (made) made.forget();
    made = drawChart(card, chartSpec(data, chart, controls));
  };
  const controls = chart.is_loss ? lossControls(choices, draw) : [];
  drawn.push(draw);
  draw();
}

function chartSpec(data, chart, controls) {
  const [first, last] = data.domain, width = choices.smooth / 1000 * (last - first), lines = [], keys = [];
  for (const { run, steps, values, is_eval: isEval } of chart.lines) {
    if (choices.hidden.has(run)) continue;
    const line = { label: data.names[run] + (isEval ? ", eval" : ""), color: runColor(run), x: steps, y: values };
    if (isEval) {
      lines.push({ ...line, dots: true, dash: [6, 4], width: 1.8, keeps: 0.98 });
    } else if (chart.is_loss && width > 0) {
      lines.push({ ...line, width: 1, opacity: 0.3 });
      lines.push({ ...line, y: smoothed(steps, values, width), width: 2, inLegend: false, keeps: 1 });
    } else {
      lines.push({ ...line, width: chart.is_loss ? 1.6 : 1.4 });
    }
  }
  if (chart.lines.some((line) => line.is_eval)) keys.push({ kind: "dash", color: color("soft"), label: "eval" });
  if (chart.is_loss && width > 0) keys.push({ kind: "", color: color("soft"), label: "train, smoothed" });
  const axis = chart.is_rate ? { axis: (value) => value === 0 ? "0" : value.toExponential(1).replace(".0e", "e") } : {};
  return { title: chart.title, height: chart.is_loss ? 320 : 200, domain: data.domain, lines, keys, controls,
    log: chart.is_loss && choices.log, zero: !chart.is_loss, ...axis };
}

render(JSON.parse(document.getElementById("data").textContent));

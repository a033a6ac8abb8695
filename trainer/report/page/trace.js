"use strict";
// report.html of two traces. `data` is what trainer/trace/page.py puts into the page.

const COLORS = ["run-8", "run-0", "run-2", "run-3"];

function render(data) {
  const grid = element("div", { class: "grid", id: "charts" });
  document.getElementById("report").replaceChildren(
    element("header", {}, element("h1", {}, data.title)), element("p", { class: "soft" }, "compared with " + data.right),
    element("p", {}, element("b", {}, data.verdict)), grid,
    element("footer", {}, element("span", {}, `run_trainer ${data.version}`)));
  if (data.lines.length) addCard(grid, (card) => drawChart(card, chartSpec(data)), true);
  const names = ["tensor", "deviation", "bound", "ranks"].map((name) => [name]);
  const rows = data.rows.map(([isBeyond, ...cells]) =>
    cells.map((cell) => isBeyond ? element("span", { class: "beyond" }, cell) : cell));
  addCard(grid, (card) => card.append(table(names, rows), data.left_out ? `and ${data.left_out} more` : ""), true);
}

function chartSpec(data) {
  const layers = data.lines.flatMap((line) => line.points.map(([layer]) => layer));
  const ratios = data.lines.flatMap((line) => line.points.map(([, ratio]) => ratio));
  const lines = data.lines.map(({ label, points }, number) => ({
    label, color: color(COLORS[number]), x: points.map(([layer]) => layer), y: points.map(([, ratio]) => ratio),
    texts: new Map(points.map(([layer, , text]) => [layer, text])), dots: true, width: 2 }));
  return { title: "largest deviation of a layer, relative to what rounding explains (dashed: 1)", height: 340, lines, log: true,
    domain: [Math.min(...layers) - 0.5, Math.max(...layers) + 0.5], rules: [{ y: 1, color: color("bad") }],
    range: [data.range[0], 10 ** Math.max(1, Math.ceil(Math.log10(Math.max(...ratios)) + 0.5))],
    axis: (value) => value.toExponential(), place: "layer",
    name: (layer) => layer < 0 ? "embedding" : layer === data.head ? "head" : String(layer) };
}

render(JSON.parse(document.getElementById("data").textContent));

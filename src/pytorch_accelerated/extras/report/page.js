"use strict";
// Draws the page from the runs in #run-data: one run, or several to compare. All text goes in as text, never as HTML.

const { runs } = JSON.parse(document.getElementById("run-data").textContent);
const page = document.getElementById("page");
const isComparison = runs.length > 1;
const root = document.documentElement;

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// ------------------------------------------------------------------------------------------------------------ numbers

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(3);
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
}

const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 1) return `${Math.max(1, Math.round(1000 * seconds))} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${(minutes / 1440).toFixed(1)} days`;
}

const moment = (time) => (time ? new Date(1000 * time).toLocaleString() : "–");

// ------------------------------------------------------------------------------------------------------ light and dark

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;
try { chosenTheme = localStorage.getItem("run-report-theme"); } catch { /* not allowed for files in some browsers */ }
// A link or a test may ask for one: report.html#dark
if (location.hash === "#dark" || location.hash === "#light") chosenTheme = location.hash.slice(1);

function applyTheme() {
  root.dataset.theme = chosenTheme || (systemIsDark.matches ? "dark" : "light");
  redrawAll();
}

function switchTheme() {
  chosenTheme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("run-report-theme", chosenTheme); } catch { /* see above */ }
  applyTheme();
}

const ink = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
const seriesColour = (index) => ink(index === REST ? "rest" : `c${index % 8}`);

// -------------------------------------------------------------------------------------------------- several runs

const COLOURS = 8;
const REST = -1; // more runs than colours: those behind are grey, and become coloured as others are hidden
const MANY = 5; // more runs than this are rows, not columns
const isCrowded = runs.length > COLOURS;
const shown = new Set(runs.keys());

function colourOf(r) {
  const place = [...shown].sort((a, b) => a - b).indexOf(r);
  return place < COLOURS ? place : REST;
}

const named = (run, r) => h("span", { class: "run", "data-run": r }, h("span", { class: "key" }), run.name);

function show(choice) {
  shown.clear();
  choice.forEach((r) => shown.add(r));
  redrawAll();
}

/** Keys and boxes of the runs are those of the curves. */
function recolour() {
  for (const name of document.querySelectorAll("[data-run]")) {
    const r = Number(name.dataset.run);
    name.classList.toggle("hidden", !shown.has(r));
    name.querySelector(".key").style.background = shown.has(r) ? seriesColour(colourOf(r)) : "none";
    const box = name.parentElement.querySelector("input");
    if (box) box.checked = shown.has(r);
  }
}

/** The curves of one run stand out; of all, if it is null. */
function emphasise(r) {
  for (const { chart, lines } of charts) {
    lines.forEach(({ line }, i) => { chart.series[i + 1].alpha = r === null || line.r === r ? 1 : 0.12; });
    chart.redraw(false);
  }
}

// ------------------------------------------------------------------------------------------------------------- curves

const settings = { x: "update", smoothing: 0.6, log: false };
const charts = [];
let zoom = null;

/** For each run: update -> x, piecewise linear between known points. */
function anchorsOf(run, mode) {
  const points = new Map([[0, 0]]);
  if (mode === "epoch") {
    for (const metric of run.metrics) {
      metric.update.forEach((update, i) => points.set(update, Math.max(points.get(update) || 0, metric.epoch[i])));
    }
    const updates = [...points.keys()].sort((a, b) => a - b);
    // Of the updates of one epoch only the last is its end.
    return updates.map((u) => [u, points.get(u)]).filter(([, e], i, all) => i === 0 || !all[i + 1] || all[i + 1][1] > e);
  }
  const column = run.steps[mode === "minutes" ? "seconds" : mode];
  run.steps.update.forEach((update, i) => points.set(update, mode === "minutes" ? column[i] / 60 : column[i]));
  return [...points].sort((a, b) => a[0] - b[0]);
}

function positions(run, updates) {
  if (settings.x === "update") return updates;
  const anchors = anchorsOf(run, settings.x);
  return updates.map((update) => {
    let after = anchors.findIndex(([known]) => known >= update);
    if (after < 0) after = anchors.length - 1;
    if (after <= 0 || anchors[after][0] === update) return anchors[Math.max(after, 0)]?.[1] ?? update;
    const [[u0, x0], [u1, x1]] = [anchors[after - 1], anchors[after]];
    return x0 + ((update - u0) / (u1 - u0)) * (x1 - x0);
  });
}

function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight); // without it the curve would begin near zero
    return mean / total;
  });
}

const MACHINE = ["rates", "norm", "throughput", "wait", "memory"]; // small panels, behind those of the model's metrics

/** The panels in their order: {title, unit, lines: [{label, run, index, dash, updates, values, isFine, best}]}. */
function panelsOf() {
  const panels = new Map();
  const add = (key, title, line) => {
    if (!panels.has(key)) panels.set(key, { title, lines: [] });
    panels.get(key).lines.push(line);
  };
  const label = (run, role) => (isComparison ? `${run.name}${role ? ` · ${role}` : ""}` : role);
  const colours = new Map();
  const colour = (role) => colours.get(role) ?? colours.set(role, colours.size).get(role);
  colour("train");
  colour("eval");
  runs.forEach((run, r) => {
    const fine = (key, title, role, values) => {
      if (values && values.some((value) => value !== null)) {
        add(key, title, { label: label(run, role), index: 0, run, r, updates: run.steps.update, values, isFine: true });
      }
    };
    fine("loss", "loss", "train", run.steps.train_loss);
    for (const metric of run.metrics) {
      const isTraining = metric.role === "train";
      if (isAlias(metric, run)) continue;
      if (isCrowded && isTraining && metric.quantity === "loss" && run.steps.update?.length) continue;
      if (metric.quantity.startsWith("learning_rate") && run.steps.learning_rates?.length) continue;
      if (metric.name === "gradient_norm" && run.steps.gradient_norm?.some((norm) => norm !== null)) continue;
      const meaning = metric.role === "" ? metric.name : isTraining && metric.quantity === "loss" ? "train, epoch" : metric.role;
      add(metric.quantity, metric.quantity.replaceAll("_", " "), {
        label: label(run, meaning + (metric.is_measured ? ", measured afterwards" : "")), index: colour(metric.role || metric.name), run, r,
        dash: isTraining, updates: metric.update, values: metric.value,
        best: run.best.find((best) => best.name === metric.name),
      });
    }
    (run.steps.learning_rates || []).forEach((rates, group) => {
      const several = run.steps.learning_rates.length > 1;
      if (group < 4) fine("rates", "learning rate", several ? `group ${group}` : "rate", rates);
      const lines = panels.get("rates")?.lines;
      if (several && lines?.length && !isComparison) lines.at(-1).index = group;
    });
    fine("norm", "gradient norm", "norm", run.steps.gradient_norm);
    fine("throughput", "samples per second, without evaluations and saves", "samples / s", run.steps.samples_per_second);
    fine("wait", "share of waiting for data", "share", run.steps.data_wait_share);
    fine("memory", "peak memory (GiB)", "GiB", run.steps.peak_memory?.map((bytes) => (bytes === null ? null : bytes / 2 ** 30)));
  });
  // Metrics of the model in front, what the machine did behind.
  return [...panels].sort(([a], [b]) => (a === "loss" ? -1 : b === "loss" ? 1 : MACHINE.indexOf(a) - MACHINE.indexOf(b)))
    .map(([key, panel]) => ({ key, ...panel }));
}

/** The lines of the runs that are shown; grey ones come first, and so lie below. */
function shownLines(panel) {
  const lines = panel.lines.filter((line) => shown.has(line.r));
  if (!isComparison) return lines;
  return lines.map((line) => ({ ...line, index: colourOf(line.r) })).sort((a, b) => (b.index === REST) - (a.index === REST));
}

/** Of several evaluation sets, the loss of the first is recorded without its name, too. */
function isAlias(metric, run) {
  const isSame = (other) => String(other.value) === String(metric.value) && String(other.update) === String(metric.update);
  return metric.role !== "" && run.metrics.some((other) =>
    other.quantity === metric.quantity && other.role.startsWith(`${metric.role} `) && isSame(other));
}

function fullRange(panels) {
  const ends = panels.flatMap((panel) => panel.lines.map((line) => positions(line.run, line.updates).at(-1) ?? 0));
  return [0, Math.max(...ends, 1e-9) * 1.005];
}

function chartOptions(panel, lines, range, width) {
  const grid = { stroke: ink("grid"), width: 1 };
  const axis = { stroke: ink("soft"), grid, ticks: { show: false }, font: "12px system-ui, DejaVu Sans, sans-serif", gap: 4 };
  const isLog = settings.log && panel.key === "loss";
  const values = { value: (u, value) => (value === null || value === undefined ? "–" : number(value)) };
  return {
    width,
    height: panel.key === "loss" ? 300 : MACHINE.includes(panel.key) ? 130 : 240,
    padding: [10, 8, 0, 0],
    scales: { x: { time: false, range: () => zoom || range }, y: { distr: isLog ? 3 : 1 } },
    axes: [
      { ...axis, size: 28, values: (u, splits) => splits.map((x) => number(x)) },
      { ...axis, size: 62, values: (u, splits) => splits.map((y) => (y === null ? null : number(y))) },
    ],
    legend: { show: !isCrowded, live: true },
    focus: { alpha: 0.15 },
    cursor: {
      focus: { prox: isCrowded ? 24 : -1 },
      drag: { x: true, y: false, setScale: false },
      sync: { key: "run" },
      points: { size: 7 },
      bind: { dblclick: () => () => zoomTo(null) },
      // The lines have values at different places: read off the nearest value of each.
      dataIdx: (u, series, hovered, x) => nearest(u.data[0], u.data[series], hovered, x),
    },
    series: [{ label: settings.x, ...values }, ...lines.map((line) => ({ ...line.style, ...values }))],
    hooks: { setSeries: [(u, i) => { u.pointedAt = i; }], setCursor: [markIdle, (u) => nameLine(u, lines)], setSelect: [zoomToSelection], draw: [(u) => drawBest(u, lines)], ready: [markIdle, readByTouch] },
  };
}

/** Without a pointer, a legend has names but no values. */
function markIdle(u) {
  u.root.classList.toggle("idle", !(u.cursor.left >= 0));
}

/** Of many curves the one under the pointer is named in the title of its panel, with its value. */
function nameLine(u, lines) {
  const line = isCrowded && u.cursor.idxs && lines[u.pointedAt - 1]?.line;
  const text = line ? ` · ${line.label}: ${number(u.data[u.pointedAt][u.cursor.idxs[u.pointedAt]])}` : "";
  u.root.closest(".panel").querySelector("h3 span").textContent = text;
}

function nearest(xs, ys, hovered, x) {
  if (ys[hovered] !== null && ys[hovered] !== undefined) return hovered;
  let [left, right] = [hovered, hovered];
  while (left >= 0 && (ys[left] === null || ys[left] === undefined)) left--;
  while (right < ys.length && (ys[right] === null || ys[right] === undefined)) right++;
  if (left < 0) return right < ys.length ? right : hovered;
  if (right >= ys.length) return left;
  return x - xs[left] <= xs[right] - x ? left : right;
}

function drawBest(u, lines) {
  for (const { line, isRaw } of lines) {
    const at = line.best && !isRaw && line.index !== REST ? line.updates.lastIndexOf(line.best.update) : -1;
    if (at < 0 || typeof line.best.value !== "number") continue;
    const x = u.valToPos(positions(line.run, line.updates)[at], "x", true);
    const y = u.valToPos(line.best.value, "y", true);
    if (!(x >= u.bbox.left && x <= u.bbox.left + u.bbox.width)) continue;
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.arc(x, y, 5.5 * devicePixelRatio, 0, 2 * Math.PI);
    u.ctx.lineWidth = 2 * devicePixelRatio;
    u.ctx.strokeStyle = seriesColour(line.index);
    u.ctx.stroke();
    u.ctx.restore();
  }
}

function zoomTo(range) {
  zoom = range;
  for (const { chart } of charts) chart.setData(chart.data, true);
}

function zoomToSelection(u) {
  if (u.select.width < 4) return;
  const [from, to] = [u.select.left, u.select.left + u.select.width].map((left) => u.posToVal(left, "x"));
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  zoomTo([from, to]);
}

/** One finger reads values off, two zoom. Mice need nothing of this. */
function readByTouch(u) {
  let start = null;
  u.over.style.touchAction = "pan-y";
  const places = (event) => [...event.touches].map((touch) => touch.clientX - u.over.getBoundingClientRect().left);
  u.over.addEventListener("touchstart", (event) => {
    start = event.touches.length === 2 ? places(event).map((place) => u.posToVal(place, "x")).sort((a, b) => a - b) : null;
  }, { passive: true });
  u.over.addEventListener("touchmove", (event) => {
    const at = places(event).sort((a, b) => a - b);
    if (at.length === 1) u.setCursor({ left: at[0], top: 20 });
    else if (start && at[1] - at[0] > 10) {
      event.preventDefault(); // the same values stay under the two fingers
      const scale = (start[1] - start[0]) / (at[1] - at[0]);
      const from = start[0] - at[0] * scale;
      zoomTo([from, from + u.over.clientWidth * scale]);
    }
  }, { passive: false });
}

function drawPanel(panel, range, holder) {
  const lines = [];
  const tables = [];
  for (const line of shownLines(panel)) {
    const rest = line.index === REST ? { width: 1, auto: false } : {};
    const xs = positions(line.run, line.updates);
    const isLog = settings.log && panel.key === "loss";
    const shown = line.values.map((value) => (typeof value !== "number" || (isLog && value <= 0) ? null : value));
    const stroke = seriesColour(line.index);
    const few = line.updates.length <= 40;
    const isSmoothed = line.isFine && !["rates", "memory"].includes(panel.key) && settings.smoothing > 0 && line.updates.length > 3;
    if (isSmoothed) {
      if (!isComparison) {
        lines.push({ line, isRaw: true, style: { label: `${line.label}, unsmoothed`, stroke: `${stroke}66`, width: 1, spanGaps: true, points: { show: false } } });
        tables.push([xs, shown]);
      }
      lines.push({ line, style: { label: line.label, stroke, width: 2, spanGaps: true, points: { show: false }, ...rest } });
      tables.push([xs, smoothed(shown, settings.smoothing)]);
    } else {
      const points = { show: few && !line.isFine && line.index !== REST, size: 5, fill: stroke };
      lines.push({ line, style: { label: line.label, stroke, width: 2, dash: line.dash ? [5, 4] : undefined, spanGaps: true, points, ...rest } });
      tables.push([xs, shown]);
    }
  }
  if (!lines.length) return;
  const data = joined(tables);
  const chart = new uPlot(chartOptions(panel, lines, range, Math.max(holder.clientWidth, 200)), data, holder);
  charts.push({ chart, lines });
}

/** uPlot wants rising places without doubles; of several values at one place the last counts. */
function joined(tables) {
  return uPlot.join(tables.map(([xs, ys]) => {
    const byPlace = new Map(xs.map((x, i) => [x, ys[i]]));
    const places = [...byPlace.keys()].sort((a, b) => a - b);
    return [places, places.map((x) => byPlace.get(x))];
  }));
}

let holders = null;
const scatters = []; // functions that draw them, once they are on the page

function redrawAll() {
  recolour();
  scatters.forEach((draw) => draw());
  if (!holders) return;
  const panels = panelsOf();
  const range = fullRange(panels);
  charts.splice(0).forEach(({ chart }) => chart.destroy());
  panels.forEach((panel, i) => drawPanel(panel, range, holders[i]));
}

function curves() {
  const panels = panelsOf();
  if (!panels.length) return [h("p", { class: "soft" }, "There is no value yet.")];
  const hasSteps = runs.every((run) => run.steps.update?.length);
  const axes = ["update", "epoch", ...(hasSteps ? ["samples", "minutes"] : [])];
  const choice = h("select", { "aria-label": "horizontal axis", onchange: (event) => { settings.x = event.target.value; zoom = null; redrawAll(); } },
    axes.map((axis) => h("option", { value: axis }, axis)));
  const strength = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smoothing, "aria-label": "smoothing",
    oninput: (event) => { settings.smoothing = Number(event.target.value); redrawAll(); } });
  const log = h("input", { type: "checkbox", onchange: (event) => { settings.log = event.target.checked; redrawAll(); } });
  const hasLoss = panels[0].key === "loss";
  const controls = h("div", { class: "controls" },
    h("label", {}, "over", choice),
    panels.some((panel) => panel.lines.some((line) => line.isFine)) ? h("label", {}, "smoothing", strength) : null,
    hasLoss ? h("label", {}, log, "logarithmic loss") : null,
    h("button", { type: "button", onclick: () => zoomTo(null) }, "whole range"),
    h("span", {}, "Drag over a curve to zoom in, on a phone with two fingers."));
  holders = panels.map(() => h("div", {}));
  const cards = panels.map((panel, i) => [panel.key,
    h("section", { class: `card panel${panel.key === "loss" ? " wide" : ""}` }, h("h3", {}, panel.title, h("span", { class: "soft" })), holders[i])]);
  const [large, small] = [false, true].map((isSmall) => cards.filter(([key]) => MACHINE.includes(key) === isSmall).map(([, card]) => card));
  return [controls, h("div", { class: "panels" }, large), h("div", { class: "panels small-panels" }, small)];
}

// ------------------------------------------------------------------------------------------------------------- tables

function list(rows, heads, numbersFrom = 1) {
  const kind = (i) => (heads && i >= numbersFrom ? "number" : null);
  return h("div", { class: "scroll" }, h("table", { class: "list" },
    heads ? h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { class: kind(i) }, head)))) : null,
    h("tbody", {}, rows.map((row) => h("tr", { class: row.differs ? "differs" : null },
      (row.cells || row).map((cell, i) => h(i || heads ? "td" : "th", { class: kind(i) }, cell)))))));
}

const plain = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : typeof value === "number" && !Number.isInteger(value) ? number(value) : String(value));

function facts(title, values) {
  const rows = Object.entries(values || {}).map(([name, value]) => [name.replaceAll("_", " "), h("code", {}, plain(value))]);
  return rows.length ? h("section", { class: "card" }, h("h3", {}, title), list(rows)) : null;
}

function section(title, ...content) {
  const inside = content.flat().filter(Boolean);
  return inside.length ? [h("h2", {}, title), ...inside] : [];
}

function tiles(run) {
  const seconds = run.epochs.reduce((sum, epoch) => sum + (epoch.seconds || 0), 0);
  const waited = run.epochs.reduce((sum, epoch) => sum + (epoch.data_wait_seconds || 0), 0);
  const speed = run.state.samples_per_second;
  const shown = [
    ...run.best.filter((best) => best.is_main).map((best) => [`best ${best.name.replace(/_epoch$/, "").replaceAll("_", " ")}`, number(best.value), `epoch ${best.epoch}`]),
    ["epochs", number(run.state.epoch) + (run.config?.num_epochs ? ` of ${run.config.num_epochs}` : ""),
      `${number(run.state.updates)} updates` + (run.state.skipped_updates ? `, ${run.state.skipped_updates} skipped` : "")],
    ["time", duration(run.state.seconds), seconds ? `training ${duration(seconds)}` : ""],
    speed ? ["samples per second", number(speed >= 100 ? Math.round(speed) : speed), "of wall time"] : null,
    seconds ? ["waiting for data", percent(waited / seconds), "of the training time"] : null,
  ];
  return h("div", { class: "tiles" }, shown.filter(Boolean).map(([name, value, remark]) =>
    h("div", { class: "card tile" }, h("span", { class: "soft small" }, name), h("b", {}, value), h("span", { class: "soft small" }, remark || "\u00a0"))));
}

function bestTable() {
  const rows = runs.flatMap((run, r) => run.best.map((best) => [
    ...(isComparison ? [named(run, r)] : []), best.name, number(best.value), number(best.epoch), number(best.last)]));
  if (!rows.length) return [];
  const heads = [...(isComparison ? ["run"] : []), "metric", "best", "epoch", "last"];
  return section("Best values", h("div", { class: "card" }, folded(list(rows, heads, heads.length - 3), rows.length, "values")));
}

const folded = (table, count, what) => (count > 20 ? h("details", {}, h("summary", {}, `${count} ${what}`), table) : table);

// ------------------------------------------------------------------------------------------------ classes and samples

// At most 0.7, so that the contrast of the text is above 5 to 1 at every shade, in light and in dark.
function heatStyle(share) {
  return share > 0 ? `background: rgba(var(--heat), ${(0.1 + 0.6 * share).toFixed(3)});` : "";
}

function classes(found, of) {
  if (!found) return [];
  const names = found.names;
  const word = found.word ?? "class";
  const cards = [];
  if (found.matrix) {
    const table = h("table", { class: "matrix" },
      h("tr", {}, h("th", {}), names.map((name) => h("th", { title: name }, name))),
      found.matrix.map((row, i) => {
        const total = row.reduce((sum, count) => sum + count, 0);
        return h("tr", {}, h("th", { title: names[i] }, names[i]), row.map((count, j) => h("td", {
          style: heatStyle(total ? count / total : 0),
          title: `${names[i]} predicted as ${names[j]}: ${count} of ${total}`,
        }, count ? String(count) : "")));
      }));
    cards.push(h("section", { class: "card" }, h("h3", {}, "Confusion matrix"),
      h("p", { class: "soft small" }, "Rows: the true class. Columns: the predicted one. Shade: share of the row."),
      h("div", { class: "scroll" }, table)));
  }
  const rows = found.table.map((row) => [row.name, percent(row.precision), percent(row.recall), percent(row.f1), number(row.support)]);
  cards.push(h("section", { class: "card" }, h("h3", {}, `By ${word}`),
    found.is_shortened ? h("p", { class: "soft small" }, `The ${rows.length} with the lowest f1, of ${found.num_classes}.`) : null,
    list(rows, [word, "precision", "recall", "f1", "support"])));
  return section(`${found.word ? "Labels" : "Classes"} (${of})`,
    h("p", { class: "soft" }, `${number(found.correct)} of ${number(found.total)} right: ${percent(found.total ? found.correct / found.total : null)}.`),
    h("div", { class: "two" }, cards));
}

function scatter(pairs, of) {
  if (!pairs) return [];
  const holder = h("div", {});
  const card = h("section", { class: "card" }, h("h3", {}, "Predicted over true"), holder);
  scatters.push(() => {
    holder.replaceChildren();
    const order = pairs.truth.map((_, i) => i).sort((a, b) => pairs.truth[a] - pairs.truth[b]);
    const [xs, ys] = [order.map((i) => pairs.truth[i]), order.map((i) => pairs.prediction[i])];
    const [low, high] = [Math.min(...xs, ...ys), Math.max(...xs, ...ys)];
    const axis = { stroke: ink("soft"), grid: { stroke: ink("grid"), width: 1 }, ticks: { show: false }, values: (u, splits) => splits.map(number) };
    const range = () => [low, high + (high === low)];
    const draw = [(u) => { // where a prediction is right
      const ends = [low, high].flatMap((value) => [u.valToPos(value, "x", true), u.valToPos(value, "y", true)]);
      u.ctx.save();
      u.ctx.beginPath();
      u.ctx.moveTo(ends[0], ends[1]);
      u.ctx.lineTo(ends[2], ends[3]);
      u.ctx.strokeStyle = ink("soft");
      u.ctx.stroke();
      u.ctx.restore();
    }];
    new uPlot({
      width: Math.min(Math.max(holder.clientWidth, 200), 560), height: 380, legend: { show: true }, hooks: { draw },
      scales: { x: { time: false, range }, y: { range } }, axes: [{ ...axis, size: 28 }, { ...axis, size: 62 }],
      series: [{ label: "true", value: (u, value) => number(value) }, { label: "predicted", value: (u, value) => number(value), stroke: ink("c0"), paths: () => null, points: { show: true, size: 5, fill: ink("c0") } }],
    }, [xs, ys], holder);
  });
  return section(`Predictions (${of})`, card);
}

function samples(worst, of) {
  if (!worst?.rows.length) return [];
  return section(`Worst predictions (${of})`,
    h("p", { class: "soft small" }, worst.what),
    h("div", { class: "samples" }, worst.rows.map((sample) => h("figure", { class: "card sample", style: "margin: 0" },
      sample.image ? h("img", { src: sample.image, alt: `input with target ${sample.target}` }) : null,
      h("div", {}, "true ", h("b", {}, plain(sample.target))),
      h("div", {}, "predicted ", h("span", { class: sample.is_right === null ? null : sample.is_right ? "right" : "wrong" }, plain(sample.prediction)),
        sample.confidence !== null ? h("span", { class: "soft" }, ` ${Math.round(100 * sample.confidence)}%`) : null),
      h("div", { class: "soft" }, `loss ${number(sample.loss)}`, typeof sample.index === "number" ? h("span", { title: "its index in the dataset" }, ` · #${sample.index}`) : null),
      sample.values ? h("div", { class: "values" }, sample.values) : null))));
}

function predictions(run) {
  return Object.entries(run.predictions).flatMap(([set, found]) => {
    const of = set ? `${set}, ${found.of}` : found.of;
    const notes = (found.notes ?? []).map((note) => h("p", { class: "soft small" }, note));
    return [...classes(found.classes, of), ...scatter(found.scatter, of), ...samples(found.samples, of), ...notes];
  });
}

// --------------------------------------------------------------------------------------------------- time and events

function times(run) {
  if (!run.epochs.length) return [];
  const parts = [["training", "c0"], ["waiting for data", "c1"], ["evaluation", "c2"], ["saves and other", "c7"]];
  const shares = run.epochs.map((epoch) => {
    const waited = epoch.data_wait_seconds ?? 0;
    const evaluated = epoch.eval_seconds ?? 0;
    const trained = Math.max((epoch.seconds ?? 0) - waited, 0);
    const all = Math.max(epoch.wall_seconds ?? 0, trained + waited + evaluated);
    return [trained, waited, evaluated, Math.max(all - trained - waited - evaluated, 0)];
  });
  const longest = Math.max(...shares.map((values) => values.reduce((a, b) => a + b)), 1e-9);
  const keys = h("div", { class: "keys" }, parts.map(([name, colour]) => h("span", {}, h("span", { class: "key", style: `background: var(--${colour})` }), name)));
  const rows = run.epochs.map((epoch, i) => {
    const all = shares[i].reduce((a, b) => a + b);
    const bar = h("div", { class: "bar", role: "img", "aria-label": parts.map(([name], p) => `${name} ${duration(shares[i][p])}`).join(", ") },
      shares[i].map((value, p) => h("i", { style: `width: ${(100 * value) / longest}%; background: var(--${parts[p][1]})`, title: `${parts[p][0]} ${duration(value)}` })));
    const waited = epoch.seconds ? (epoch.data_wait_seconds ?? 0) / epoch.seconds : null;
    return [String(epoch.epoch), bar, duration(all), percent(waited)];
  });
  const table = h("table", { class: "list" },
    h("thead", {}, h("tr", {}, ["epoch", "", "time", "waiting"].map((head, i) => h("th", { class: i > 1 ? "number" : null }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: i > 1 ? "number" : null, style: i === 1 ? "width: 99%" : "vertical-align: middle" }, cell))))));
  const content = [keys, h("div", { class: "scroll" }, table)];
  const card = h("div", { class: "card" }, run.epochs.length > 15 ? h("details", {}, h("summary", {}, `${run.epochs.length} epochs`), content) : content);
  return section("Time per epoch", card);
}

function ranks(run) {
  if (!run.steps.ranks?.length) return [];
  const rows = run.steps.ranks.map((seconds, rank) => [String(rank), ...seconds.map(duration), percent(seconds[2] / seconds.reduce((a, b) => a + b))]);
  const table = list(rows, ["rank", "computation", "waiting for data", "waiting for the others", "of the time"], 0);
  return section("Training time by rank", h("div", { class: "card" }, folded(table, rows.length, "ranks")));
}

/** The rows of the training set that an event is about, folded. */
function rowsOf({ rows, number_of_rows: all, update }) {
  if (!rows) return null;
  const more = all > rows.length ? ` and ${number(all - rows.length)} more` : "";
  return h("details", {}, h("summary", {}, `${number(all)} ${all === 1 ? "row" : "rows"} of the training set`),
    h("p", {}, rows.join(", ") + more),
    h("p", { class: "soft" }, "To do the update again and look at each: ", h("code", {}, `trainer.replay(states, update=${Number(update)})`)));
}

function events(run) {
  if (!run.events.length) return [];
  const rows = run.events.map((event) => [new Date(1000 * event.time).toLocaleTimeString(), String(event.epoch), number(event.update), event.what, [event.text, rowsOf(event)]]);
  const table = list(rows, ["time", "epoch", "update", "event", ""], 9);
  table.classList.add("events");
  return section("Events", h("div", { class: "card" }, folded(table, rows.length, "events")));
}

// ------------------------------------------------------------------------------------------------------------ the page

function stateMessage(run) {
  const { status, detail, updated } = run.state;
  const silent = Date.now() / 1000 - updated;
  if (status === "running" && updated && silent > 600) {
    return h("div", { class: "message stopped" }, `This page was last written ${duration(silent)} ago. If the run writes more often than that, its process has ended without a word.`);
  }
  return detail ? h("div", { class: `message ${status}` }, detail) : null;
}

function head(title, subtitle, ...rest) {
  return [h("header", {}, h("h1", {}, title), ...rest, h("span", { class: "space" }), h("button", { type: "button", id: "theme", onclick: switchTheme }, "light / dark")),
    h("p", { class: "soft" }, subtitle)];
}

function pill(run) {
  return run.state.status ? h("span", { class: `pill ${run.state.status}` }, run.state.status) : null;
}

function single(run) {
  const model = run.model || {};
  const what = [model.class, model.parameters ? `${number(model.parameters)} parameters` : null, model.optimizer, run.environment?.device].filter(Boolean).join(" · ");
  const when = run.state.started ? `${moment(run.state.started)}, ${run.state.status === "running" ? "last written" : "ended"} ${moment(run.state.updated)}` : "";
  page.append(
    ...head(run.name, what, pill(run)),
    h("p", { class: "soft small" }, when),
    ...[stateMessage(run)].filter(Boolean),
    tiles(run),
    ...section("Curves", curves()),
    ...bestTable(),
    ...predictions(run),
    ...times(run),
    ...ranks(run),
    ...events(run),
    ...section("What ran", h("div", { class: "two" }, [facts("Branch", run.branch), facts("Model", run.model), facts("Environment", run.environment), facts("Configuration", run.config), facts("Given by the user", run.notes)].filter(Boolean))));
}

/** What the runs record of themselves, apart from what nobody chose: {name, cells, differs}. */
function settingsOfRuns() {
  // A package that one run did not import is no difference.
  const environments = runs.map((run) => run.environment).filter((values) => values && Object.keys(values).length);
  const isKnownToAll = (name) => environments.every((values) => name in values);
  const flat = (run) => {
    const all = new Map();
    for (const part of ["branch", "notes", "model", "config", "environment"]) {
      for (const [name, value] of Object.entries(run[part] || {})) {
        if (name === "derived_seed" || (part === "environment" && !isKnownToAll(name))) continue;
        if (value !== null && typeof value === "object" && !Array.isArray(value)) {
          for (const [inner, one] of Object.entries(value)) all.set(`${part}: ${name}.${inner}`, plain(one));
        } else all.set(`${part}: ${name}`, plain(value));
      }
    }
    return all;
  };
  const all = runs.map(flat);
  const rows = new Map();
  for (const name of new Set(all.flatMap((values) => [...values.keys()]))) {
    const cells = all.map((values) => values.get(name) ?? "–");
    const differs = new Set(cells).size > 1;
    const key = differs ? cells.join("\n") : name; // a batch size, say, is in several places: the first is enough
    if (!rows.has(key)) rows.set(key, { name: name.replaceAll("_", " "), cells, differs, others: [] });
    else rows.get(key).others.push(name.replaceAll("_", " "));
  }
  return [...rows.values()];
}

const nameOf = (row, name = row.name) => h("span", { title: [row.name, ...row.others].join("\n") }, name,
  row.others.length ? h("span", { class: "soft small" }, ` +${row.others.length}`) : null);

const code = (text) => h("code", {}, text);

function differences(rows) {
  const heads = ["", ...runs.map(named)];
  const different = rows.filter((row) => row.differs).map((row) => [nameOf(row), ...row.cells.map(code)]);
  const same = rows.filter((row) => !row.differs).map((row) => [row.name, code(row.cells[0])]);
  const table = different.length ? list(different, heads, 99) : h("p", {}, "Nothing that was recorded.");
  return section("What differs",
    runs.length > MANY ? null : h("div", { class: "card" }, table),
    same.length ? h("details", { class: "card", style: "margin-top: 12px" }, h("summary", {}, `${same.length} entries are the same`), list(same, ["", "all runs"], 99)) : null);
}

/** One row for each run; of many runs also with what they differ in. */
function runsTable(rows) {
  const metrics = mainMetrics();
  const bests = metrics.map((name) => runs.map((run) => run.best.find((best) => best.name === name)));
  const winners = bests.map((column) => {
    const values = column.map((best) => best?.value).filter((value) => typeof value === "number");
    return column.some((best) => best?.greater_is_better) ? Math.max(...values) : Math.min(...values);
  });
  const marked = (value, i) => (value === winners[i] ? h("b", { class: "best", title: "the best of all runs" }, `★ ${number(value)}`) : number(value));
  const added = runs.length > MANY ? rows.filter((row) => row.differs) : [];
  const box = (run, r) => h("input", { type: "checkbox", checked: "", "aria-label": `show ${run.name}`,
    onchange: () => show(shown.has(r) ? [...shown].filter((other) => other !== r) : [...shown, r]) });
  const table = list(
    runs.map((run, r) => [h("label", {}, box(run, r), named(run, r)), pill(run) || "–", ...bests.map((column, i) => marked(column[r]?.value, i)),
      number(run.state.epoch), number(run.state.updates), duration(run.state.seconds), ...added.map((row) => code(row.cells[r]))]),
    ["run", "state", ...metrics.map((name) => `best ${name.replaceAll("_", " ")}`), "epochs", "updates", "time", ...added.map((row) => nameOf(row, row.name.replace(/^\w+: /, "")))], 2);
  table.classList.add("runs", "tall");
  table.querySelectorAll("tbody tr").forEach((row, r) => {
    row.addEventListener("mouseenter", () => emphasise(shown.has(r) ? r : null));
    row.addEventListener("mouseleave", () => emphasise(null));
  });
  const button = (text, choice) => h("button", { type: "button", onclick: () => show(choice) }, text);
  const all = [...runs.keys()];
  return h("div", { class: "card", style: "margin-top: 14px" },
    h("div", { class: "controls" }, button("all", all), button("none", []), isCrowded ? button(`first ${COLOURS}`, all.slice(0, COLOURS)) : null,
      h("span", {}, "Uncheck a run to hide its curves. Point at a run to see them.")),
    table);
}

function comparison() {
  const rows = settingsOfRuns();
  const sources = runs.length > MANY ? "" : runs.map((run) => run.source || run.name).join(" · ");
  page.append(
    ...head(`${runs.length} runs`, sources),
    runsTable(rows),
    ...(runs.length > MANY ? [] : differences(rows)),
    ...section("Curves", curves()),
    ...bestTable(),
    ...(runs.length > MANY ? differences(rows) : []));
}

const mainMetrics = () => [...new Set(runs.flatMap((run) => run.best.filter((best) => best.is_main).map((best) => best.name)))];

function keepUpToDate(run) {
  if (run.state.status !== "running" || !run.state.seconds_between_writes) return;
  const silent = Date.now() / 1000 - run.state.updated;
  if (silent > 600) return;
  setTimeout(function look() {
    if (document.hidden || zoom) setTimeout(look, 2000); // not while somebody looks closely
    else location.reload();
  }, Math.max(5, run.state.seconds_between_writes) * 1000);
}

root.dataset.theme = "light";
if (isComparison) comparison();
else {
  single(runs[0]);
  keepUpToDate(runs[0]);
}
page.append(h("footer", {}, "Written by pytorch-accelerated. The curves are drawn by uPlot (MIT licence), which this file contains."));
applyTheme();
systemIsDark.addEventListener("change", applyTheme);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) { width = innerWidth; redrawAll(); } // phones fire it when their bars move
});
root.dataset.ready = "yes";

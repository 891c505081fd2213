"use strict";
const COLORS = ["#3b82f6", "#f97316", "#10b981", "#e0559f", "#a78bfa", "#d4a106", "#06a8c4",
  "#ef4444", "#7ca616", "#a8744f"];
const SMOOTHED = .1;  // of the run: single batches differ by several nats
const UNION = 1200, GRID = 700;  // points of the common axis: all that there are, or evenly spaced
const $ = id => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const state = {axis: "step", filter: "", sort: "", track: ""};  // and address
const AXES = {step: "steps", tokens: "training tokens", seconds: "training time"};
const WHOLE = [...Array(13).keys()].flatMap(i => [1, 2, 5].map(n => n * 10 ** i));  // of ticks
const charts = {};
let zoom = null;

// ---- Small things

function el(tag, props, ...children) {  // text stays text: nothing here parses HTML
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}
function swatch(color) {
  const node = el("span", {className: "swatch"});
  node.style.background = color;
  return node;
}
const known = value => typeof value === "number" && isFinite(value);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const show = value => typeof value === "string" ? value : JSON.stringify(value) ?? "";
const color = i => COLORS[i] ?? `hsl(${Math.round(i * 137.5 % 360)} 62% 55%)`;
const mixed = (tone, percent) => `color-mix(in srgb, ${tone} ${percent}%, transparent)`;
const two = value => String(Math.floor(value)).padStart(2, "0");

function short(value) {
  for (const [from, unit, letter] of [[1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (value >= from) return +(value / unit).toPrecision(4) + letter;
  return String(+value.toPrecision(5));
}

function duration(s) {
  if (s < 120) return +s.toFixed(1) + " s";
  if (s < 7200) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  return `${Math.floor(s / 3600)} h ${two(s % 3600 / 60)} min`;
}

const place = x => state.axis === "seconds" ? duration(x) : short(x);

function quantile(values, part) {  // of the known ones
  const sorted = values.filter(known).sort((a, b) => a - b);
  const at = (sorted.length - 1) * part, low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

// ---- Lines on a common axis: {id, group, label, color, dash, y, dots}, a band has low and high

function smoothed(values) {  // the mean over the last tenth of the run
  const size = Math.max(1, Math.round(values.length * SMOOTHED));
  return values.map((value, i) => {
    const part = values.slice(Math.max(0, i - size + 1), i + 1).filter(known);
    return known(value) ? part.reduce((a, b) => a + b, 0) / part.length : null;
  });
}

function curveOf(run, name) {  // [x, y]; validations where no training loss is logged
  const silent = name === "loss" && !run.curve.loss.length;
  const {[state.axis]: x, [name]: raw} = silent ? run.val : run.curve;
  const y = name === "loss" && !silent ? smoothed(raw) : raw;
  const keep = [...y.keys()].filter(i => known(y[i]) && known(x[i]));
  return [keep.map(i => x[i]), keep.map(i => y[i])];
}

function commonAxis(curves) {
  const [low, high] = zoom ?? [-Infinity, Infinity];
  const all = new Set();
  for (const [xs] of curves)
    xs.forEach((x, i) => { if ((xs[i + 1] ?? x) >= low && (xs[i - 1] ?? x) <= high) all.add(x); });
  const sorted = [...all].sort((a, b) => a - b);
  if (sorted.length <= UNION) return sorted;
  const width = (sorted.at(-1) - sorted[0]) / GRID;
  return Array.from({length: GRID + 1}, (_, i) => sorted[0] + i * width);
}

function onto(grid, [xs, ys]) {  // linear between the points, null outside
  let i = 0;
  return grid.map(x => {
    while (i < xs.length - 1 && xs[i + 1] < x) i++;
    if (!xs.length || x < xs[0] || x > xs.at(-1)) return null;
    if (i === xs.length - 1 || x <= xs[i]) return ys[i];
    return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i]);
  });
}

function linesOf(groups, name) {
  const curves = new Map(groups.flatMap(group => group.runs).map(run => [run, curveOf(run, name)]));
  const grid = commonAxis(curves.values());
  const lines = [];
  for (const group of groups) {
    const members = group.runs.filter(run => curves.get(run)[0].length);
    const ys = members.map(run => onto(grid, curves.get(run)));
    const reference = group.record && groups.some(other => !other.record);
    const line = {group: group.id, color: group.color, dash: reference ? [6, 4] : []};
    if (members.length > 1 && !isOpen(group))
      lines.push({...line, ...band(ys), id: group.id, label: group.label, runs: members});
    else
      members.forEach((run, i) => lines.push({...line, id: run.id, color: run.color, y: ys[i],
        label: members.length > 1 ? run.name : group.label, runs: [run]}));
  }
  return {grid, lines};
}

function band(ys) {  // median and 5 to 95 % of the runs, where at least half of them are
  const columns = ys[0].map((_, i) => ys.map(y => y[i]).filter(known));
  const at = part => columns.map(ys2 => 2 * ys2.length >= ys.length ? quantile(ys2, part) : null);
  return {y: at(.5), low: at(.05), high: at(.95)};
}

function validationsOf(runs) {  // their median at each step
  const dots = runs.flatMap(run => run.val.step.map((step, i) =>
    ({step, x: run.val[state.axis][i], y: run.val.loss[i]})));
  const median = (dots, name) => quantile(dots.map(dot => dot[name]), .5);
  const medians = [...Map.groupBy(dots, dot => dot.step).values()].map(all =>
    ({x: median(all, "x"), y: median(all, "y")}));
  return medians.filter(dot => known(dot.x) && known(dot.y)).sort((a, b) => a.x - b.x);
}

// ---- Charts

function drawChart(name, groups) {
  const {grid, lines} = linesOf(groups, name);
  const chart = charts[name] ??= {};
  for (const line of lines) {
    line.dots = name === "loss" ? validationsOf(line.runs) : [];
    line.pale = name === "loss" && line.runs.some(run => run.curve.loss.length);  // it is training
  }
  Object.assign(chart, {name, lines, targets: [], marks: []});
  const all = groups.flatMap(group => group.runs);
  if (name === "loss") {
    chart.targets = [...new Set(all.map(run => run.target).filter(known))];
    chart.marks = all.flatMap(run => run.skips[state.axis].map(x => [x, run.color]));
  }
  chart.range = name === "loss" ? lossRange(grid, chart) : null;
  $(name).hidden = !lines.length;
  if ($(name).hidden) return;
  const columns = lines.flatMap(line => line.low ? [line.y, line.high, line.low] : [line.y]);
  const data = [grid, ...columns];
  const style = lines.map(({id, color, dash, low, pale}) => [id, color, dash, Boolean(low), pale]);
  const key = JSON.stringify([state.axis, dark.matches, style]);
  if (chart.key !== key) {
    chart.plot?.destroy();
    chart.key = key;
    chart.plot = new uPlot(options(chart), data, $(name).lastElementChild);
  }
  chart.plot.setSize(size(chart));  // the window may have changed while the chart was hidden
  chart.plot.setData(data);
}

function lossRange(grid, {lines, targets}) {  // the steep start would flatten the rest
  const start = zoom ? -Infinity : grid[0] + .04 * (grid.at(-1) - grid[0]);
  const ys = lines.flatMap(line => [line.y, line.low ?? [], line.high ?? []]);
  const dots = lines.flatMap(line => line.dots.map(dot => dot.y));
  const all = [targets, dots, ...ys].flat().filter(known);
  const late = [targets, ...ys.map(y => y.filter((_, i) => grid[i] >= start))].flat().filter(known);
  const low = all.reduce((a, b) => Math.min(a, b), Infinity);
  const high = late.reduce((a, b) => Math.max(a, b), -Infinity);
  const room = .05 * (high - low) || .1;
  return high >= low ? [low - room, high + room] : [0, 1];
}

function options(chart) {
  const series = [{}], bands = [];
  const paths = chart.name === "window" ? uPlot.paths.stepped({align: 1}) : undefined;
  for (const line of chart.lines) {
    const shared = {paths, dash: line.dash, points: {show: false}};
    line.index = series.length;
    const pale = mixed(line.color, dark.matches ? 60 : 50);
    series.push({...shared, stroke: line.pale ? pale : line.color,
      width: line.pale || chart.lines.length > 19 ? 1.2 : 2});
    if (!line.low) continue;
    const edge = {...shared, stroke: "transparent", width: 0};
    const pair = [series.push(edge) - 1, series.push({...edge}) - 1];
    bands.push({series: pair, fill: mixed(line.color, 16)});
  }
  const grid = {stroke: css("--grid"), width: 1};
  const axis = {stroke: css("--soft"), grid, ticks: {show: false}, font: "11px system-ui"};
  return {
    ...size(chart), series, bands, legend: {show: false}, padding: [8, 12, 0, 0],
    scales: {
      x: {time: false, range: (plot, low, high = 1) => zoom ?? [-.01 * high, 1.015 * high || 1]},
      y: {range: (plot, low = 0, high = 1) => chart.range ?? [Math.min(0, low), high * 1.08 || 1]},
    },
    axes: [{...axis, values: (plot, ticks) => ticks.map(place), space: 70, size: 26,
      ...state.axis === "seconds" ? {} : {incrs: WHOLE},
      label: AXES[state.axis], labelSize: 16, labelFont: axis.font},
      {...axis, values: (plot, ticks) => ticks.map(short), space: 34, size: 46}],
    focus: {alpha: .25},
    cursor: {sync: {key: "axis"}, y: false, points: {one: true, size: 7}, focus: {prox: 30},
      drag: {setScale: false}, bind: {dblclick: () => () => { zoom = null; render(); }}},
    hooks: {draw: [plot => drawMarks(chart, plot)], setSelect: [zoomIn],
      setCursor: [plot => showTip(chart, plot)],
      init: [plot => plot.over.addEventListener("mouseleave", () => { $("tip").hidden = true; })]},
  };
}

function size(chart) {
  const height = chart.name === "loss" ? Math.max(260, Math.min(400, innerHeight * .45)) : 150;
  return {width: $(chart.name).lastElementChild.clientWidth, height};
}

function zoomIn(plot) {
  const {left, width} = plot.select;
  if (width < 5) return;
  zoom = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
  plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
  render();
}

function drawMarks(chart, plot) {  // targets, validations, skipped steps
  const {ctx, bbox: {left, top, width, height}} = plot, scale = devicePixelRatio;
  const at = (value, axis) => plot.valToPos(value, axis, true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.strokeStyle = css("--soft");
  ctx.setLineDash([2 * scale, 4 * scale]);
  ctx.fillStyle = css("--soft");
  ctx.font = `${11 * scale}px system-ui`;
  ctx.textAlign = "left";
  for (const target of chart.targets) {
    ctx.stroke(new Path2D(`M${left} ${at(target, "y")}h${width}`));
    ctx.fillText(`target of validation: ${target}`, left, at(target, "y") - 5 * scale);
  }
  ctx.setLineDash([]);
  ctx.lineWidth = 2 * scale;
  for (const {dots, color, dash} of chart.lines) {
    const line = new Path2D();
    for (const {x, y} of dots) line.lineTo(at(x, "x"), at(y, "y"));
    ctx.strokeStyle = ctx.fillStyle = color;
    ctx.setLineDash(dash.map(length => length * scale));
    ctx.stroke(line);
    ctx.setLineDash([]);
    ctx.strokeStyle = css("--card");
    for (const {x, y} of dots) {
      const circle = new Path2D();
      circle.arc(at(x, "x"), at(y, "y"), 4.5 * scale, 0, 7);
      ctx.fill(circle);
      ctx.stroke(circle);
    }
  }
  for (const [x, color] of chart.marks) {  // triangles at the foot
    const side = 8 * scale;
    ctx.fillStyle = color;
    ctx.fill(new Path2D(`M${at(x, "x")} ${top + height - side}l${side / 2} ${side}h${-side}z`));
  }
  ctx.restore();
}

function tipRows({name, lines}, plot) {  // every line at the pointer, the best first
  const {idx} = plot.cursor, x = plot.data[0][idx];
  const digits = y => !known(y) ? "" : name === "loss" ? y.toFixed(4) : short(y);
  return lines.map(({label, color, dots, y: {[idx]: y}}) => {
    const [joined] = onto([x], [dots.map(dot => dot.x), dots.map(dot => dot.y)]);
    const dot = [...dots].sort((a, b) => Math.abs(a.x - x) - Math.abs(b.x - x))[0];
    const values = [digits(y), digits(dot?.y) + (dot && dot.x !== x ? ` at ${place(dot.x)}` : "")];
    return {label, color, values, y: y ?? joined};
  }).filter(row => known(row.y)).sort((a, b) => name === "speed" ? b.y - a.y : a.y - b.y);
}

function showTip(chart, plot) {
  const {left, top, idx} = plot.cursor, tip = $("tip");
  if (!plot.over.matches(":hover")) return;  // the other charts follow its cursor
  const rows = idx === null ? [] : tipRows(chart, plot);
  tip.hidden = !rows.length;
  if (tip.hidden) return;
  const tr = (tag, cells) => el("tr", {}, ...cells.map(([className, ...content]) =>
    el(tag, {className}, ...content)));
  const head = chart.name === "loss" ? ["training", "validation"] : ["", ""];
  const where = `${place(plot.data[0][idx])} ${AXES[state.axis]}`;
  tip.replaceChildren(el("table", {}, tr("th", [where, ...head].map(text => ["", text])),
    ...rows.map(({label, color, values}) =>
      tr("td", [["", swatch(color), label], ...values.map(text => ["num", text])]))));
  const box = plot.over.getBoundingClientRect(), {offsetWidth: width, offsetHeight: height} = tip;
  const right = box.left + left + 14 + width < innerWidth;  // else it is left of the pointer
  tip.style.left = Math.max(4, box.left + left + (right ? 14 : -14 - width)) + "px";
  tip.style.top = Math.max(4, Math.min(box.top + top + 16, innerHeight - height - 8)) + "px";
}

function focus(id) {  // of a row: a group or a run; null: all
  for (const {plot, lines} of Object.values(charts)) {
    const line = lines.find(line => line.id === id || line.group === id);
    if (plot && (line || id === null)) plot.setSeries(line?.index ?? null, {focus: true});
  }
}

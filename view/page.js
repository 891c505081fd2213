"use strict";
const COLORS = ["#3b82f6", "#f97316", "#10b981", "#e0559f", "#a78bfa", "#d4a106", "#06a8c4",
  "#ef4444", "#7ca616", "#a8744f"];
const POLL = 2000, FRESH = 60;  // ms between questions; seconds without news in which a run lives
const UNION = 1200, GRID = 700;  // points of the common axis: all that there are, or evenly spaced
const MANY = 30;  // a single group of at most so many runs begins open
const SECONDS = [.1, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000];
const FONT = "11px Inter, system-ui, sans-serif";
const $ = id => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const embedded = JSON.parse($("data").textContent);
const state = {axis: "step", lines: "groups", smooth: "0.1", filter: ""};  // also in the address
const hidden = new Set(), toggled = new Set(), runs = new Map(), charts = {};
let order = [], version = 0, now = 0, zoom = null, unread = [], folders = [];

// ---- Small things

function el(tag, props, ...children) {  // text stays text: nothing here parses HTML
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}
const known = value => typeof value === "number" && isFinite(value);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const show = value => typeof value === "string" ? value : JSON.stringify(value) ?? "";
const color = i => COLORS[i] ?? `hsl(${Math.round(i * 137.5 % 360)} 62% 55%)`;
const mixed = (tone, percent) => `color-mix(in srgb, ${tone} ${percent}%, transparent)`;
const flip = (set, id) => { set.delete(id) || set.add(id); render(); };
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

function quantile(values, part) {  // of the known ones
  const sorted = values.filter(known).sort((a, b) => a - b);
  const at = (sorted.length - 1) * part, low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

// ---- Runs and groups

function statusOf(run) {
  if (run.status === null) return now - run.modified < FRESH ? "running" : "stopped";
  if (run.status !== "done" || !known(run.target) || !known(run.loss)) return run.status;
  return run.loss <= run.target ? "reached" : "missed";
}

function makeGroups() {
  const groups = new Map();
  for (const run of order.map(id => runs.get(id))) {
    if (!groups.has(run.group)) groups.set(run.group, {...run, id: run.group, runs: []});
    groups.get(run.group).runs.push(run);
  }
  const all = [...groups.values()];
  const alone = all.length === 1 && order.length <= MANY;  // then each run has its own color
  all.forEach((group, i) => {
    group.color = color(i);
    group.open = alone || group.runs.some(run => statusOf(run) === "running");
    group.runs.forEach((run, j) => { run.color = color(alone ? j : i); });
  });
  tellApart(all);
  return all;
}

function tellApart(groups) {  // what a group's settings have that most groups' have not
  const facts = groups.map(group => ({...group.config, source: show(group.source).slice(0, 6)}));
  groups.forEach(group => { group.differs = []; });
  for (const name of new Set(facts.flatMap(Object.keys))) {
    const values = facts.map(fact => show(fact[name]) || "not set"), counts = new Map();
    for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
    const usual = [...counts].reduce((a, b) => b[1] > a[1] ? b : a)[0];
    for (const [i, value] of values.entries())
      if (value !== usual) groups[i].differs.push(`${name} ${value}`);
  }
  for (const group of groups) {
    const name = group.record || !group.config.recipe ? group.folder : show(group.config.recipe);
    group.label = [name, ...group.record ? [] : group.differs.slice(0, 2)].join(" · ");
  }
}

function keepRuns(groups, keep) {
  return groups.map(group => ({...group, runs: group.runs.filter(run => keep(run, group))}))
    .filter(group => group.runs.length);
}

function matches(run, group) {
  const settings = Object.entries(run.config).map(([name, value]) => `${name}=${show(value)}`);
  const text = [group.label, run.name, run.folder, run.track, `seed=${run.seed}`, statusOf(run),
    `source=${run.source}`, ...group.differs, ...settings].join("\n").toLowerCase();
  return state.filter.toLowerCase().split(/\s+/).every(word => text.includes(word));
}

// ---- Lines on a common axis: {id, group, label, color, dash, y}, a band also has low and high

function smoothed(values) {  // the mean over a share of the run up to each point
  const size = Math.max(1, Math.round(values.length * state.smooth));
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
    // Batches of a short run differ much: where it was validated on the way, that is its curve.
    const faint = name === "loss" && group.runs.some(run => run.quick.step.length);
    const line = {group: group.id, color: group.color, faint, dash: reference ? [6, 4] : []};
    if (members.length > 1 && (state.lines === "groups" || reference))
      lines.push({...line, ...band(ys), id: group.id, label: `${group.label}, ${ys.length} runs`});
    else
      members.forEach((run, i) =>
        lines.push({...line, id: run.id, label: run.name, color: run.color, y: ys[i]}));
  }
  return {grid, lines};
}

function band(ys) {  // median and 5 to 95 % of the runs, where at least half of them are
  const columns = ys[0].map((_, i) => ys.map(y => y[i]).filter(known));
  const at = part => columns.map(ys2 => 2 * ys2.length >= ys.length ? quantile(ys2, part) : null);
  return {y: at(.5), low: at(.05), high: at(.95)};
}

function validationsOf(runs) {  // their median at each step; few: of a quick one, on few tokens
  const steps = new Map();
  for (const run of runs)
    for (const kind of ["quick", "val"])
      run[kind].step.forEach((step, i) => steps.set(step, [...steps.get(step) ?? [],
        {x: run[kind][state.axis][i], y: run[kind].loss[i], few: kind === "quick"}]));
  const median = (dots, name) => quantile(dots.map(dot => dot[name]), .5);
  const dots = [...steps.values()].map(all =>
    ({x: median(all, "x"), y: median(all, "y"), few: all[0].few}));
  return {color: runs[0].color,
    dots: dots.filter(dot => known(dot.x) && known(dot.y)).sort((a, b) => a.x - b.x)};
}

// ---- Charts

function drawChart(name, groups) {
  const {grid, lines} = linesOf(groups, name);
  const chart = charts[name] ??= {};
  Object.assign(chart, {name, lines, targets: [], curves: [], marks: []});
  const all = groups.flatMap(group => group.runs);
  const marksOf = kind => all.flatMap(run => run[kind][state.axis].map(x => [x, run.color]));
  if (name === "loss") {
    chart.targets = [...new Set(all.map(run => run.target).filter(known))];
    chart.curves = (state.lines === "runs" ? all.map(run => [run]) : groups.map(one => one.runs))
      .map(validationsOf);
    chart.marks = marksOf("skips");
  } else if (name === "speed" && state.lines === "runs") chart.marks = marksOf("stutters");
  chart.range = name === "loss" ? lossRange(grid, chart) : null;
  $(name).hidden = !lines.length && name !== "loss";
  if ($(name).hidden) return;
  const columns = lines.flatMap(line => line.low ? [line.y, line.high, line.low] : [line.y]);
  const data = [grid, ...columns];
  const style = lines.map(line => [line.id, line.color, line.faint, line.dash, Boolean(line.low)]);
  const key = JSON.stringify([state.axis, dark.matches, style]);
  if (chart.key === key) return chart.plot.setData(data);
  chart.plot?.destroy();
  chart.key = key;
  chart.plot = new uPlot(options(chart), data, $(name).lastElementChild);
}

function lossRange(grid, {lines, targets, curves}) {  // the steep start would flatten the rest
  const start = zoom ? -Infinity : grid[0] + .04 * (grid.at(-1) - grid[0]);
  const ys = lines.flatMap(line => [line.y, line.low ?? [], line.high ?? []]);
  const dots = curves.flatMap(curve => curve.dots.map(dot => dot.y));
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
    const stroke = line.faint ? mixed(line.color, 40) : line.color;
    series.push({...shared, stroke, width: chart.lines.length < 20 && !line.faint ? 2 : 1.2});
    if (!line.low) continue;
    const edge = {...shared, stroke: "transparent", width: 0};
    const pair = [series.push(edge) - 1, series.push({...edge}) - 1];
    bands.push({series: pair, fill: mixed(line.color, 16)});
  }
  const grid = {stroke: css("--grid"), width: 1};
  const axis = {stroke: css("--soft"), grid, ticks: {show: false}, font: FONT};
  const values = (plot, ticks) => ticks.map(state.axis !== "seconds" ? short
    : s => s < 60 ? `${+s.toFixed(1)} s` : `${Math.floor(s / 60)}:${two(s % 60)}`);
  const incrs = state.axis === "seconds" ? SECONDS : undefined;
  return {
    ...size(chart), series, bands, legend: {show: false}, padding: [8, 12, 0, 0],
    scales: {
      x: {time: false, range: (plot, low = 0, high = 1) =>
        zoom ?? [low - .01 * (high - low), high + .015 * (high - low || 1)]},
      y: {range: (plot, low = 0, high = 1) => chart.range ?? [Math.min(0, low), high * 1.08 || 1]},
    },
    axes: [{...axis, values, incrs, space: 70, size: 26},
      {...axis, values: (plot, ticks) => ticks.map(short), space: 34, size: 46}],
    focus: {alpha: .25},
    cursor: {sync: {key: "axis"}, y: false, points: {one: true, size: 7}, focus: {prox: 30},
      drag: {setScale: false}, bind: {dblclick: () => () => { zoom = null; render(); }}},
    hooks: {draw: [plot => drawMarks(chart, plot)], setSelect: [zoomIn],
      setCursor: [plot => showTip(chart, plot)]},
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

function drawMarks(chart, plot) {  // targets, validations, skipped and slow steps
  const {ctx, bbox: {left, top, width, height}} = plot, scale = devicePixelRatio;
  const place = (value, axis) => plot.valToPos(value, axis, true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.strokeStyle = css("--soft");
  ctx.setLineDash([2 * scale, 4 * scale]);
  for (const target of chart.targets)
    ctx.stroke(new Path2D(`M${left} ${place(target, "y")}h${width}`));
  ctx.setLineDash([]);
  ctx.lineWidth = 1.5 * scale;
  for (const {dots, color} of chart.curves) {
    const line = new Path2D();
    for (const {x, y} of dots) line.lineTo(place(x, "x"), place(y, "y"));
    ctx.strokeStyle = ctx.fillStyle = color;
    ctx.stroke(line);
    ctx.strokeStyle = css("--card");
    for (const {x, y, few} of dots) {
      const circle = new Path2D();
      circle.arc(place(x, "x"), place(y, "y"), (few ? 3 : 4.5) * scale, 0, 7);
      ctx.fill(circle);
      ctx.stroke(circle);
    }
  }
  for (const [x, color] of chart.marks) {  // triangles at the foot
    const side = 8 * scale;
    ctx.fillStyle = color;
    ctx.fill(new Path2D(`M${place(x, "x")} ${top + height - side}l${side / 2} ${side}h${-side}z`));
  }
  ctx.restore();
}

function showTip(chart, plot) {
  const {left, top, idx} = plot.cursor;
  if (!plot.over.matches(":hover")) return;  // the other charts follow its cursor
  const away = line => Math.abs(plot.valToPos(line.y[idx] ?? Infinity, "y") - top);
  const best = chart.lines.reduce((a, b) => away(a) <= away(b) ? a : b);
  $("tip").hidden = !(away(best) < 30);
  if ($("tip").hidden) return;
  const x = plot.data[0][idx], y = best.y[idx], box = plot.over.getBoundingClientRect();
  const where = {step: `step ${short(x)}`, tokens: `${short(x)} tokens`, seconds: duration(x)};
  $("tip").textContent =
    `${best.label}\n${where[state.axis]}: ${chart.name === "loss" ? y.toFixed(4) : short(y)}`;
  const most = innerWidth - $("tip").offsetWidth - 8;  // px, so that it stays in the window
  $("tip").style.left = Math.min(box.left + left + 14, most) + "px";
  $("tip").style.top = box.top + top + 16 + "px";
}

function focus(id) {  // of a row: a group or a run; null: all
  for (const {plot, lines} of Object.values(charts)) {
    const line = lines.find(line => line.id === id || line.group === id);
    if (plot && (line || id === null)) plot.setSeries(line?.index ?? null, {focus: true});
  }
}

// ---- Table

function row(item, kind, name, [seed, loss, time, steps, status, differs]) {
  const box = el("input", {type: "checkbox", checked: !hidden.has(item.id),
    onchange: () => flip(hidden, item.id), ariaLabel: "draw " + (item.label ?? item.name)});
  const swatch = el("span", {className: "swatch"});
  swatch.style.background = item.color;
  const cell = (className, ...children) => el("td", {className}, ...children);
  return el("tr", {className: `${kind} ${hidden.has(item.id) ? "off" : ""}`,
    onmouseenter: () => focus(item.id), onmouseleave: () => focus(null)},
  cell("", box, swatch, ...name), cell("num wide", seed), cell("num", ...loss), cell("num", time),
  cell("num wide", steps), cell("", ...status), cell("wide differs", ...differs));
}

const soft = text => el("span", {className: "soft"}, text);
const colored = (word, text, title) => el("span", {className: word, title}, text);
const isOpen = group => toggled.has(group.id) !== group.open;

function groupRow(group) {
  const {runs} = group, open = isOpen(group), n = runs.length;
  const losses = runs.filter(run => run.status === "done").map(run => run.loss).filter(known);
  const mean = losses.reduce((a, b) => a + b, 0) / losses.length;
  const squares = losses.reduce((sum, loss) => sum + (loss - mean) ** 2, 0);
  const sd = losses.length > 1 ? ` ± ${Math.sqrt(squares / (losses.length - 1)).toFixed(4)}` : "";
  const words = runs.map(statusOf);
  const status = [...new Set(words)].map(word =>
    colored(word, `${words.filter(other => other === word).length} ${word} `, ""));
  const chips = group.differs.slice(0, 4).map(text =>
    el("span", {className: "chip"}, text.length > 40 ? text.slice(0, 39) + "…" : text));
  const rest = el("span", {className: "soft", title: group.differs.join("\n")},
    group.differs.length > 4 ? `and ${group.differs.length - 4} more` : "");
  const steps = new Set(runs.map(run => run.done));
  const name = el("button", {onclick: () => flip(toggled, group.id), ariaExpanded: open},
    `${open ? "▾" : "▸"} ${group.label}`);
  return row(group, "group", [name, soft(`  ${n} run${n > 1 ? "s" : ""}`)],
    ["", [losses.length ? mean.toFixed(4) : "", soft(sd)],
      duration(quantile(runs.map(run => run.seconds), .5) || 0),
      steps.size === 1 ? [...steps][0] : "", status, [...chips, rest]]);
}

function runRow(run) {
  const word = statusOf(run);
  const of = known(run.total) && run.total !== run.done ? ` of ${run.total}` : "";
  const rest = run.seconds / run.done * (run.total - run.done);
  const left = word === "running" && rest > 0 ? `, ${duration(rest)} left` : "";
  return row(run, "run", [el("button", {onclick: () => openRun(run)}, run.name)],
    [show(run.seed ?? ""), [known(run.loss) ? run.loss.toFixed(4) : ""], duration(run.seconds ?? 0),
      run.done + of, [colored(word, word + left, run.why)],
      [soft(word === "running" ? "" : run.why)]]);
}

// ---- A run's header and log

const flat = (value, prefix = "") => Object.entries(value).flatMap(([name, item]) =>
  item?.constructor === Object ? flat(item, `${prefix}${name}.`) : [[prefix + name, show(item)]]);

async function openRun(run) {
  const excerpt = embedded?.excerpts[run.id] ?? await (await fetch(`run?id=${run.id}`)).json();
  let header = {};
  try { header = JSON.parse(excerpt.first); } catch { /* a text log has none */ }
  const facts = flat({status: statusOf(run), why: run.why, folder: run.folder, ...header});
  $("name").textContent = run.name;
  $("facts").replaceChildren(...facts.filter(([, value]) => value).map(([name, value]) =>
    el("div", {}, el("dt", {className: "soft"}, name), el("dd", {}, value))));
  $("log").textContent = excerpt.last;
  $("dialog").showModal();
  $("log").scrollTop = $("log").scrollHeight;
}

// ---- The page

function render() {
  for (const name of ["lines", "axis"])
    for (const button of $(name).children)
      button.ariaPressed = button.dataset.value === state[name];
  for (const name of ["filter", "smooth"]) $(name).value = state[name];
  $("none").hidden = order.length > 0;
  $("content").hidden = !order.length;
  $("none").textContent = `No runs yet. They appear when a log is written to ${folders.join(", ")}`;
  $("unread").textContent = unread.map(reason => `not read: ${reason}`).join("\n");
  if (!order.length) return;
  const groups = keepRuns(makeGroups(), matches);
  const drawn = keepRuns(groups, (run, group) => !hidden.has(run.id) && !hidden.has(group.id));
  for (const name of ["loss", "lr", "window", "speed"]) drawChart(name, drawn);
  const words = groups.flatMap(group => group.runs).map(statusOf);
  const count = word => words.filter(other => other === word).length;
  const silent = drawn.flatMap(group => group.runs).filter(run => !curveOf(run, "loss")[0].length);
  $("legend").textContent = ["line: training, smoothed", "dots: validation, on other text",
    ...(drawn.some(group => group.runs.some(run => run.quick.step.length))
      ? ["small dots: quick validation, on a few of its tokens"] : []),
    ...(charts.loss.targets.length ? [`dotted: target ${charts.loss.targets.join(", ")}`] : []),
    ...(state.lines === "groups" ? ["band: 5 to 95 % of the runs"] : []),
    ...(silent.length ? [`${silent.length} without data on this axis`] : [])].join("; ");
  $("count").textContent = [`${words.length} in ${groups.length} group(s)`,
    ...["running", "reached"].filter(count).map(word => `${count(word)} ${word}`)].join(" · ");
  $("rows").replaceChildren(...groups.flatMap(group =>
    [groupRow(group), ...(isOpen(group) ? group.runs.map(runRow) : [])]));
}

function take(reply) {
  const changed = reply.version !== version || !version;
  ({version, now, unread, folders, ids: order} = reply);
  for (const run of reply.runs) runs.set(run.id, run);
  $("live").className = embedded ? "" : "on";
  $("live").textContent = reply.more ? "reading" : "live";
  if (embedded) $("live").textContent = new Date(now * 1000).toLocaleString();
  if (changed || [...runs.values()].some(run => run.status === null)) render();
}

async function poll() {
  let wait = POLL;
  try {
    const reply = await (await fetch(`runs?since=${version}`)).json();
    take(reply);
    wait = reply.more ? 0 : POLL;
  } catch {
    $("live").className = "";
    $("live").textContent = "the server has ended";
  }
  setTimeout(poll, wait);
}

function set(changes) {
  Object.assign(state, changes);
  if (changes.axis) zoom = null;
  history.replaceState(null, "", "#" + new URLSearchParams(state));
  render();
}

for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
  if (name in state) state[name] = value;
for (const name of ["lines", "axis"])
  for (const button of $(name).children) button.onclick = () => set({[name]: button.dataset.value});
for (const name of ["filter", "smooth"]) $(name).oninput = () => set({[name]: $(name).value});
$("close").onclick = () => $("dialog").close();
dark.addEventListener("change", render);
addEventListener("resize", () => {
  for (const chart of Object.values(charts)) chart.plot?.setSize(size(chart));
});
if (embedded) take(embedded); else poll();

"use strict";
const POLL = 2000, FRESH = 60;  // ms between questions; seconds without news in which a run lives
const MANY = 30;  // a single group of at most so many runs begins open
const embedded = JSON.parse($("data").textContent);
const STATUS = ["reached", "done", "running", "missed", "interrupted", "stopped", "nonfinite",
  "error"];  // the best first
const COLUMNS = {Name: "", Seed: "num wide", Loss: "num", "New tokens": "num wide",
  "Held out": "num wide", Time: "num wide", Steps: "num wide", Status: "",
  "What differs": "differs wide"};  // the class of their cells; no phone shows the wide ones
const UNSORTED = "Held out";  // sorting by it would choose by it
const TITLES = {Loss: "mean loss of the validation tokens", "Held out":
  "loss on the slice of the text that nothing is chosen by", "New tokens":
  "loss on tokens that do not end a pair seen earlier in their document; †: on the first 16,384 " +
  "validation tokens, where a pair more than 176 tokens back counts as new"};
const hidden = new Set(), opened = new Map(), runs = new Map();
let order = [], live = new Set(), version = 0, now = 0, folders = [], shown = [];
let letters = new Map();  // A and B, if two groups are drawn
let compared = "";  // which comparison is shown

// ---- Runs and groups

function statusOf(run) {
  if (run.status === null)  // a validation writes nothing for minutes
    return live.has(run.id) || now - run.modified < FRESH ? "running" : "stopped";
  if (run.status !== "done" || !known(run.target) || !known(run.loss)) return run.status;
  return run.loss <= run.target ? "reached" : "missed";
}

function tracks() {  // the shown one first: losses compare within a track only
  const all = order.map(id => runs.get(id)), names = [...new Set(all.map(run => run.track))];
  const news = run => run.record ? 0 : live.has(run.id) ? Infinity : run.modified;
  const newest = all.reduce((a, b) => news(b) > news(a) ? b : a);
  const first = names.includes(state.track) ? state.track : newest.track;
  return [first, ...names.filter(name => name !== first)];
}

function makeGroups(track) {
  const members = Map.groupBy(order.map(id => runs.get(id)).filter(run => run.track === track),
    run => run.group);
  const all = [...members].map(([id, runs]) => ({...runs[0], id, runs}));
  const alone = all.length === 1 && all[0].runs.length <= MANY;  // then each run has its own color
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
  const names = [...new Set(facts.flatMap(Object.keys))];
  const everywhere = name => facts.every(fact => name in fact);  // older logs lack new settings
  for (const name of names.sort((a, b) => everywhere(b) - everywhere(a))) {
    const values = facts.map(fact => show(fact[name]) || "not set"), counts = new Map();
    for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
    const usual = [...counts].reduce((a, b) => b[1] > a[1] ? b : a)[0];
    for (const [i, value] of values.entries())
      if (value !== usual) groups[i].differs.push(`${name} ${value}`);
  }
  for (const group of groups) {
    const name = group.record || !group.config.recipe ? group.folder : show(group.config.recipe);
    const differs = group.differs.filter(differs => differs !== `recipe ${name}`).slice(0, 2);
    group.label = [group.arm, name, ...group.record ? [] : differs].filter(Boolean).join(" · ");
  }
}

function keepRuns(groups, keep) {
  return groups.map(group => ({...group, runs: group.runs.filter(run => keep(run, group))}))
    .filter(group => group.runs.length);
}

function matches(run, group) {  // words in names and status; name=value of a setting
  const names = [group.label, run.name, run.folder, run.track, statusOf(run)].join("\n");
  const facts = {...run.config, seed: run.seed, source: run.source};
  const settings = Object.entries(facts).map(([name, value]) => `${name}=${show(value)}`);
  return state.filter.trim().split(/\s+/).every(word => word.includes("=")
    ? settings.includes(word) : names.toLowerCase().includes(word.toLowerCase()));
}

// ---- Show and hide

const hide = id => { hidden.delete(id) || hidden.add(id); set({}); };
const showAll = () => { hidden.clear(); set({filter: ""}); };

function onlyThis(id) {  // a group, or a run without its siblings; once more: all
  const group = shown.find(group => group.id === id || group.runs.some(run => run.id === id));
  const others = [...shown, ...group.id === id ? [] : group.runs].map(item => item.id)
    .filter(other => other !== id && other !== group.id);
  const again = others.length === hidden.size && others.every(other => hidden.has(other));
  hidden.clear();
  if (!again) others.forEach(other => hidden.add(other));
  set({});
}

// ---- Table

const soft = text => el("span", {className: "soft"}, text);
const colored = (word, text, title) => el("span", {className: word, title}, text);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const isOpen = group => opened.get(group.id) ?? group.open;

function figuresOf(item) {  // of a group or a run: what a column sorts by, and what is shown of it
  const all = item.runs ?? [item], words = all.map(statusOf);
  const finished = item.runs ? all.filter(run => run.status === "done") : all;
  const average = values => values.reduce((a, b) => a + b, 0) / values.length;
  const losses = finished.map(run => run.loss).filter(known), n = losses.length;
  const mean = average(losses), meanOf = name => average(finished.map(run => run[name] ?? NaN));
  const squares = losses.reduce((sum, loss) => sum + (loss - mean) ** 2, 0);
  return {
    words, sd: n > 1 ? Math.sqrt(squares / (n - 1)) : NaN,
    Name: item.label ?? item.name, Seed: Math.min(...all.map(run => run.seed ?? Infinity)),
    Loss: mean, "New tokens": meanOf("new_tokens"), "Held out": meanOf("held_out"),
    Time: quantile(all.map(run => run.seconds), .5),
    Steps: Math.max(...all.map(run => run.done)),
    Status: words.reduce((sum, word) => sum + STATUS.indexOf(word), 0) / words.length,
    "What differs": item.differs?.join() ?? item.why,
  };
}

function sorted(items) {  // by the chosen column; what is not known comes last
  const column = state.sort.replace("-", ""), sign = state.sort[0] === "-" ? -1 : 1;
  if (!(column in COLUMNS) || column === UNSORTED) return items;
  const values = new Map(items.map(item => [item, figuresOf(item)[column]]));
  const unknown = value => typeof value === "number" && !isFinite(value);
  return [...items].sort((one, other) => {
    const a = values.get(one), b = values.get(other);
    if (unknown(a) || unknown(b)) return unknown(a) - unknown(b);
    return sign * (typeof a === "string" ? a.localeCompare(b, "en", {numeric: true}) : a - b);
  });
}

function row(item) {
  const {id, runs} = item, figures = figuresOf(item), {Name: name, words} = figures;
  const open = runs && isOpen(item), n = runs?.length;
  const box = el("input", {type: "checkbox", checked: !hidden.has(id), id: `draw ${id}`,
    onchange: () => hide(id), ariaLabel: `draw ${name}`});
  const only = el("button", {className: "only", id: `only ${id}`, onclick: () => onlyThis(id),
    ariaLabel: `draw only ${name}`, title: "once more: all"}, "only");
  const unfold = () => { opened.set(id, !open); render(); };
  const button = el("button", {id: `open ${id}`, onclick: runs ? unfold : () => openRun(item),
    ariaExpanded: runs ? open : null}, runs ? `${open ? "▾" : "▸"} ${name}` : name);
  const of = known(item.total) && item.total !== item.done ? ` of ${item.total}` : "";
  const rest = item.seconds / item.done * (item.total - item.done);
  const left = words[0] === "running" && rest > 0 ? `, ${duration(rest)} left` : "";
  const status = [...new Set(words)].flatMap((word, i) => runs
    ? [i ? ", " : "", colored(word, `${words.filter(other => other === word).length} ${word}`, "")]
    : colored(word, word + left, item.why));
  const others = n && item.differs.length > 4 ? ` and ${item.differs.length - 4} more` : "";
  const differs = runs ? item.differs.slice(0, 4).join(", ") + others : left ? "" : item.why;
  const contents = {
    Name: [el("div", {className: "name"}, box, swatch(item.color), letters.get(id) ?? "", button,
      soft(runs ? plural(n, "run") : ""), only)],
    Seed: [runs ? "" : show(item.seed ?? "")],
    Loss: [known(figures.Loss) ? figures.Loss.toFixed(4) : "",
      soft(known(figures.sd) ? ` ± ${figures.sd.toFixed(4)}` : "")],
    "New tokens": [known(figures["New tokens"]) ? figures["New tokens"].toFixed(3) : "",
      soft((runs ?? [item]).some(run => run.new_measure === "new_loss") ? "†" : "")],
    "Held out": [known(figures["Held out"]) ? figures["Held out"].toFixed(4) : ""],
    Time: [duration(figures.Time || 0)],
    Steps: [runs?.some(run => run.done !== item.done) ? "" : item.done + (runs ? "" : of)],
    Status: status,
    "What differs": [el("span", {title: runs ? item.differs.join("\n") : ""}, differs)],
  };
  return el("tr", {className: `${runs ? "group" : "run"} ${hidden.has(id) ? "off" : ""}`,
    onmouseenter: () => focus(id), onmouseleave: () => focus(null)},
  ...Object.entries(COLUMNS).map(([column, className]) =>
    el("td", {className}, ...contents[column])));
}

function drawTable() {
  const focused = document.activeElement.id;
  $("columns").replaceChildren(...Object.entries(COLUMNS).map(([name, className]) => {
    const next = {[name]: "-" + name, ["-" + name]: ""}[state.sort] ?? name;
    const ariaSort = {[name]: "ascending", ["-" + name]: "descending"}[state.sort] ?? "none";
    const title = TITLES[name] ?? "";
    if (name === UNSORTED) return el("th", {className, title}, name);
    const sort = () => set({sort: next});
    const button = el("button", {id: `sort ${name}`, onclick: sort, title}, name);
    return el("th", {className, ariaSort}, button);
  }));
  $("rows").replaceChildren(...sorted(shown).flatMap(group =>
    [group, ...isOpen(group) ? sorted(group.runs) : []]).map(row));
  if (document.activeElement.id !== focused) $(focused)?.focus({preventScroll: true});
}

// ---- Details of a run, two groups compared

const flat = (value, prefix = "") => Object.entries(value).flatMap(([key, item]) =>
  item?.constructor === Object ? flat(item, `${prefix}${key}.`) : `${prefix}${key}: ${show(item)}`);

function openRun(run) {
  const {differs} = shown.find(group => group.id === run.group);
  const facts = flat({folder: run.folder, ...run.more, settings: run.config});
  $("name").textContent = run.name;
  $("differs").textContent = differs.join("\n") || "nothing";
  $("facts").textContent = facts.join("\n");
  $("dialog").showModal();
}

async function drawComparison(drawn) {
  const [a, b] = drawn, two = drawn.length === 2 && !embedded;  // a file has no server to ask
  $("comparison").hidden = !two;
  const path = two ? `compare?a=${a.id}&b=${b.id}` : "", key = path + version;
  if (!two || compared === key) return;
  compared = key;
  const text = await (await fetch(path)).json();
  if (compared !== key) return;
  const heads = drawn.map(group => el("b", {}, swatch(group.color), letters.get(group.id),
    `${group.label}\n`));
  $("comparison").replaceChildren(...heads, text);
}

// ---- The page

function notice(drawn) {  // why there is nothing to see, and what helps
  const code = text => el("code", {}, text);
  const all = el("button", {onclick: showAll}, "Show all");
  if (!order.length)
    return ["No runs yet. Start one: ", code("./run.sh --steps 20"),
      ` They appear here when a log is written to ${folders.join(", ")}.`];
  if (!shown.length)
    return [`No run matches ${state.filter}. A word is searched in names, folders and status; `,
      "a setting is ", code("steps=70"), " ", all];
  return drawn.length ? [] : ["Every run is hidden. ", all];
}

function render() {
  for (const button of $("axis").children)
    button.ariaPressed = button.dataset.value === state.axis;
  $("filter").value = state.filter;
  const [track, ...others] = order.length ? tracks() : [];
  $("track").hidden = !others.length;
  $("track").replaceChildren(...[track, ...others].sort().map(name => el("button", {
    onclick: () => set({track: name}), ariaPressed: name === track, id: `track ${name}`}, name)));
  shown = keepRuns(makeGroups(track), matches);
  const drawn = keepRuns(shown, (run, group) => !hidden.has(run.id) && !hidden.has(group.id));
  const why = notice(drawn);
  $("none").replaceChildren(...why);
  $("none").hidden = !why.length;
  $("charts").hidden = why.length > 0;
  $("table").hidden = !order.length;
  letters = new Map(drawn.length === 2 ? drawn.map((group, i) => [group.id, `${"AB"[i]} `]) : []);
  const names = ["loss", "norm", "lr", "window", "speed"];
  if (drawn.length) names.forEach(name => drawChart(name, drawn));
  drawComparison(drawn);
  drawTable();
  const words = shown.flatMap(group => group.runs).map(statusOf);
  const silent = drawn.flatMap(group => group.runs).filter(run => !curveOf(run, "loss")[0].length)
    .length;
  const count = word => words.filter(other => other === word).length;
  $("count").textContent = [`${words.length} in ${plural(shown.length, "group")}`,
    ...["running", "reached"].filter(count).map(word => `${count(word)} ${word}`),
    ...hidden.size ? [`${hidden.size} hidden`] : [],
    ...silent ? [`${silent} without data on this axis`] : []].join(" · ");
}

function take(reply) {
  const changed = reply.version !== version || !version;
  ({version, now, folders, ids: order} = reply);
  live = new Set(reply.live);
  $("unread").textContent = reply.unread.map(reason => `not read: ${reason}`).join("\n");
  for (const run of reply.runs) runs.set(run.id, run);
  $("live").className = embedded ? "" : "on";
  const written = new Date(now * 1000).toLocaleString();
  $("live").textContent = embedded ? written : reply.more ? "reading" : "live";
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

function set(changes) {  // the axes follow what is visible
  Object.assign(state, changes);
  zoom = null;
  history.replaceState(null, "", "#" + new URLSearchParams(state));
  render();
}

for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
  if (name in state) state[name] = value;
for (const button of $("axis").children) button.onclick = () => set({axis: button.dataset.value});
$("filter").oninput = () => set({filter: $("filter").value});
dark.addEventListener("change", render);
addEventListener("resize", () => {  // a hidden chart gets its size when it is shown
  for (const [name, chart] of Object.entries(charts))
    if (!$(name).hidden) chart.plot?.setSize(size(chart));
});
if (embedded) take(embedded); else poll();

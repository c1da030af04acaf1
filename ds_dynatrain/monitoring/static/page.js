"use strict";
// Everything that the server tells is set as text, never as markup.

const EVERY = 2000, LIMIT = 5000, OLD = 4;  // a member is in red after so many heartbeats
const KINDS = { start: "#667078", join: "#2a9d5c", leave: "#c98a00", failure: "#d0342c", restore: "#a02090",
  "taken over": "#4a72d8", switch: "#0b8fb0" };
const LOST = { PROGRAM_STARTUP: "#9aa5ad", TRAINING_PREP: "#6d7a83", UNPRODUCTIVE_CHECKPOINT_SAVE_TIME: "#e08a1e",
  WASTED_PROGRESS_FROM_DISRUPTION: "#d0342c", INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION: "#8e1b3a", ELASTIC_SLICE_DOWN: "#d4b106",
  ELASTIC_SCALE_UP: "#3b7dd8", ELASTIC_REINITIALIZATION: "#0b8fb0", OTHER: "#b9a3d0" };
const COLORS = ["#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#8a9199"];
const GOOD = "#2a9d5c";
const $ = (id) => document.getElementById(id);
let seen = null, answered = Date.now();
const charts = {};

// ---- words ------------------------------------------------------------------------------------------------------

const two = (number) => String(number).padStart(2, "0");
const clock = (at) => { const d = new Date(1000 * at); return [d.getHours(), d.getMinutes(), d.getSeconds()].map(two).join(":"); };
const day = (at) => { const d = new Date(1000 * at); return `${two(d.getMonth() + 1)}-${two(d.getDate())}`; };

// A time on an axis, as finely as the range asks for.
function tick(at, range) {
  if (range > 172800) return `${day(at)} ${clock(at).slice(0, 5)}`;
  return range > 1200 ? clock(at).slice(0, 5) : clock(at);
}

function seconds(count) {
  if (count === null || count === undefined) return "";
  if (count < 0.9995) return `${Math.round(1000 * count)} ms`;
  if (count < 100) return `${count.toFixed(1)} s`;
  const minutes = Math.floor(count / 60);
  return minutes < 100 ? `${minutes} min ${two(Math.floor(count % 60))} s` : `${(count / 3600).toFixed(1)} h`;
}

const value = (figure) => typeof figure === "number" ? String(+figure.toPrecision(4)) : figure || "";
const number = (value) => value >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
const weight = (bytes) => bytes < 1e5 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
const share = (part) => `${(100 * part).toFixed(1)} %`;

function make(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function spot(color) { const made = make("i"); made.style.background = color; return made; }

// A cell is text, a node, or [either, its class].
function row(cells, tag = "td", name = "") {
  const made = make("tr", undefined, name);
  for (const cell of cells) {
    const [inside, kind] = Array.isArray(cell) ? cell : [cell, ""];
    const box = make(tag, undefined, kind);
    box.append(inside === null || inside === undefined ? "" : inside);
    made.append(box);
  }
  return made;
}

function fill(id, head, rows, none) {
  const whole = rows.length ? rows : [row([[none, "soft"]])];
  if (!rows.length) whole[0].firstElementChild.colSpan = head.length;
  $(id).replaceChildren(row(head, "th"), ...whole);
}

function bar(parts, whole) {
  const made = make("div", undefined, "bar");
  for (const [name, value, color] of parts) {
    if (value <= 0) continue;
    const part = spot(color);
    part.style.width = `${100 * value / whole}%`;
    part.title = name;
    made.append(part);
  }
  return made;
}

function legend(id, entries) {
  $(id).replaceChildren(...entries.map(([name, color]) => {
    const made = make("span");
    made.append(spot(color), name);
    return made;
  }));
}

// ---- charts -----------------------------------------------------------------------------------------------------

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function marks(plot) {
  const pen = plot.ctx, { left, top, width, height } = plot.bbox;
  pen.save();
  for (const [at, kind] of plot.marks || []) {
    const x = Math.round(plot.valToPos(at, "x", true));
    if (x < left || x > left + width) continue;
    pen.strokeStyle = KINDS[kind];
    pen.lineWidth = devicePixelRatio;
    pen.setLineDash(kind === "switch" ? [3, 3] : []);
    pen.beginPath(); pen.moveTo(x, top); pen.lineTo(x, top + height); pen.stroke();
  }
  pen.restore();
}

// What is under the cursor, and the change that is there.
function point(plot, id, value) {
  const at = plot.cursor.idx, left = plot.cursor.left;
  if (at === null || at === undefined || left < 0) { $(`${id}-at`).textContent = ""; return; }
  const near = (plot.marks || []).filter(([when]) => Math.abs(plot.valToPos(when, "x") - left) < 8).map(([, kind, why]) => `${kind}: ${why}`);
  const held = plot.data[1][at];
  $(`${id}-at`).textContent = [`${clock(plot.data[0][at])}  ${held === null ? "" : value(held)}`, ...near].join("   ");
}

function chart(id, value, least, stepped) {
  const axis = { stroke: () => style("--soft"), grid: { stroke: () => style("--line"), width: 1 }, ticks: { show: false } };
  const line = { stroke: () => style("--series"), width: 1.5,
    fill: stepped ? () => `${style("--series")}22` : undefined, points: { show: false },
    paths: stepped ? uPlot.paths.stepped({ align: 1 }) : undefined };
  return new uPlot({
    width: $(id).clientWidth, height: 140, legend: { show: false }, cursor: { sync: { key: "time" }, y: false },
    scales: { x: { time: true }, y: { range: (_, low, high) => least === null && high !== null ? uPlot.rangeNum(low, high, 0.1, true) : [0, Math.max(least || 1e-9, 1.15 * (high || 0))] } },
    axes: [{ ...axis, size: 30, space: 90, values: (plot, all) => all.map((at) => tick(at, plot.scales.x.max - plot.scales.x.min)) }, { ...axis, size: 70, space: 22, values: (_, all) => all.map((v) => value(v)), incrs: stepped ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] : undefined }],
    series: [{}, line],
    hooks: { draw: [marks], setCursor: [(plot) => point(plot, id, value)] },
  }, [[], []], $(id));
}

function draw(view) {
  if (!charts.size) {
    charts.size = chart("size", (v) => String(v), 1, true);
    charts.step = chart("step", seconds, 0.01, false);
    charts.rate = chart("rate", number, 1, false);
    charts.loss = chart("loss", value, null, false);
  }
  const { points, changes, switches } = view;
  const range = Number($("range").value), first = Math.min(view.at - 10, ...changes.slice(0, 1).map((c) => c.at), ...points.slice(0, 1).map((p) => p.at));
  const from = range ? Math.max(first, view.at - range) : first;
  const lines = [...changes.map((c) => [c.at, c.kind, c.reason]),
    ...switches.filter((s) => asked(s, changes)).map((s) => [s.at, "switch", `${s.source} → ${s.target}`])];
  const sizes = [...changes.map((c) => [c.at, c.size]), [view.at, view.status.ranks.length]];
  const data = { size: sizes, step: points.map((p) => [p.at, p.step_seconds]), rate: points.map((p) => [p.at, p.samples_per_second]),
    loss: points.map((p) => [p.at, p.loss]) };
  for (const [id, rows] of Object.entries(data)) {
    charts[id].marks = lines;
    charts[id].setData([rows.map((r) => r[0]), rows.map((r) => r[1])], false);
    charts[id].setScale("x", { min: from, max: view.at });
  }
}

// Whether a switch is one of its own, and not that of a change of members just before it.
function asked(one, changes) {
  const before = changes.filter((change) => change.at <= one.at).pop();
  return !before || before.size !== one.members || one.at - before.at > 30;
}

// ---- the rest ---------------------------------------------------------------------------------------------------

function head(view) {
  const { status, goodput } = view, last = view.points[view.points.length - 1];
  const name = status.job ? `job ${status.job}` : "a job without a name";
  document.title = `${view.state}: ${name}`;
  $("job").textContent = name;
  $("state").className = `state ${view.state}`;
  $("state").firstElementChild.textContent = view.state;
  $("state").lastElementChild.textContent = view.why;
  const nodes = new Set(status.ranks.map((member) => member.slice(0, member.lastIndexOf("/"))));
  const figures = [
    [number(view.step), "steps"],
    [last ? seconds(last.step_seconds) : "–", "a step"],
    [last ? number(last.samples_per_second) : "–", "samples/s"],
    [last ? value(last.loss) || "–" : "–", "loss"],
    [String(status.ranks.length), `members on ${nodes.size} of ${status.min_nodes} to ${status.max_nodes} nodes`],
    [share(goodput.ratio), `of ${seconds(goodput.total_elapsed_time)} became training (ETTR)`],
    [String(goodput.disruption_count), `failures; ${view.counts.lost_steps} steps lost`],
  ];
  $("figures").replaceChildren(...figures.map(([value, what]) => {
    const made = make("li");
    made.append(make("b", value), make("span", what));
    return made;
  }));
}

function account(view) {
  const { goodput, meaning } = view, causes = Object.entries(goodput.badput_time);
  const parts = [["productive", goodput.goodput_time, GOOD], ...causes.map(([name, s]) => [name, s, LOST[name] || "#888"])];
  const whole = parts.reduce((sum, part) => sum + part[1], 0) || 1;
  $("goodput-bar").replaceChildren(...bar(parts.map(([n, s, c]) => [`${n}: ${seconds(s)}`, s, c]), whole).children);
  fill("goodput", ["cause", ["time", "number"], ["share", "number"], "what it is"], parts.filter((part, place) => !place || part[1] > 0).map(([name, s, color]) => {
    const words = make("span");
    words.append(spot(color), name);
    return row([[words, "short"], [seconds(s), "number"], [share(s / whole), "number"], [meaning[name] || "steps that count", "soft"]]);
  }), "");
}

const memory = (f) => f.memory_bytes === null ? "" : `${(f.memory_bytes / 1e9).toFixed(1)} of ${(f.memory_limit / 1e9).toFixed(0)} GB`;

// Columns of the table of members: the title, the cell of a member, its class. A column without any text is left out.
const COLUMNS = [
  ["rank", (one) => one.rank === null ? "–" : String(one.rank), "number"],
  ["phase", (one) => one.phase, ""],
  ["step", (one) => number(one.step), "number"],
  ["loss", (one) => value(one.figures.loss), (one) => typeof one.figures.loss === "string" ? "number bad" : "number"],
  ["learning rate", (one) => value(one.figures.learning_rate), "number"],
  ["memory", (one) => memory(one.figures), "number"],
  ["GPU", (one) => one.figures.gpu_percent === null ? "" : `${one.figures.gpu_percent} %`, "number"],
  ["layout", (one) => one.layout, "short"],
  ["last pause", (one) => one.pause_ms ? seconds(one.pause_ms / 1000) : "", "number"],
  ["protected", (one) => one.protected, ""],
  ["heard of, ago", (one) => seconds(one.heard_seconds), (one, beat) => one.heard_seconds > OLD * beat ? "number bad" : "number"],
  ["process", (one) => String(one.pid), "number"],
  ["waits for", (one) => one.waits_for, ""],
];

function link(member) {
  const made = make("a", "log and stack");
  made.href = `doing?${encodeURIComponent(member)}`;
  made.target = "_blank";
  return made;
}

function members(view) {
  const { members, starting, beat_seconds } = view.status, nodes = new Map();
  for (const one of members) {
    const node = one.member.slice(0, one.member.lastIndexOf("/"));
    nodes.set(node, [...(nodes.get(node) || []), one]);
  }
  const columns = COLUMNS.filter(([, cell]) => members.some(cell)), rows = [];
  const line = (cells, name) => { rows.push(row(cells, "td", name)); rows.at(-1).lastElementChild.colSpan = columns.length + 2 - cells.length; };
  for (const [node, all] of nodes) {
    line([node], "node");
    for (const one of all) {
      line([...columns.map(([, cell, kind]) => [cell(one), typeof kind === "string" ? kind : kind(one, beat_seconds)]), [link(one.member), "short"]]);
    }
  }
  for (const one of starting) {
    line([one.node], "node");
    line([[`its workers start, for ${seconds(one.seconds)} so far`, "soft"]]);
  }
  fill("members", [...columns.map(([title, , kind]) => [title, kind === "" || kind === "short" ? "" : "number"]), "is doing"], rows, "nobody is there");
}

function changes(view) {
  const rows = [...view.changes].reverse().map((one) => {
    const kind = make("span");
    kind.append(spot(KINDS[one.kind]), one.kind + (one.paused ? ", paused" : ""));
    const still = one.still_seconds === null ? "" : seconds(one.still_seconds);
    return row([[clock(one.at), "short"], [String(one.generation), "number"], [kind, "short"], [String(one.size), "number"],
      [still, "number"], [one.lost_steps ? String(one.lost_steps) : "", "number"], one.reason]);
  });
  fill("changes", ["time", ["generation", "number"], "for", ["members", "number"], ["stood still", "number"], ["steps lost", "number"], "reason"], rows, "no change yet");
}

function pauses(view) {
  const names = [...new Set(view.switches.flatMap((one) => Object.keys(one.phases_ms)))];
  const color = (name) => COLORS[names.indexOf(name) % COLORS.length];
  legend("phases", names.map((name) => [name, color(name)]));
  const longest = Math.max(1, ...view.switches.map((one) => Object.values(one.phases_ms).reduce((a, b) => a + b, 0)));
  const rows = [...view.switches].reverse().map((one) => row([
    [clock(one.at), "short"], [number(one.step), "number"], [`${one.source} → ${one.target}`, ""],
    [seconds(one.pause_ms / 1000), "number"],
    bar(Object.entries(one.phases_ms).map(([name, ms]) => [`${name}: ${Math.round(ms)} ms`, ms, color(name)]), longest),
    [`${weight(one.bytes_sent)} (${weight(one.bytes_minimum)})`, "number"],
    one.committed ? `committed${one.cause ? `, for ${one.cause}` : ""}` : `rolled back: ${one.reason}`,
  ]));
  fill("switches", ["time", ["step", "number"], "layouts", ["pause", "number"], "phases", ["sent (least)", "number"], "outcome"], rows, "no switch yet");
}

function show(view) {
  seen = view;
  head(view);
  draw(view);
  account(view);
  members(view);
  changes(view);
  pauses(view);
}

async function look() {
  if (!document.hidden) {
    try {
      const answer = await fetch(new URL("status.json", location.origin + location.pathname), { signal: AbortSignal.timeout(LIMIT), cache: "no-store" });
      if (!answer.ok) throw new Error(`the coordinator answered ${answer.status}`);
      show(await answer.json());
      answered = Date.now();
      $("lost-contact").hidden = true;
    } catch (error) {
      $("lost-contact").hidden = false;
      $("lost-contact").textContent = `No answer for ${seconds((Date.now() - answered) / 1000)} (${error.message}): what is below is old.`;
    }
  }
  setTimeout(look, EVERY);
}

legend("kinds", Object.entries(KINDS));
$("range").addEventListener("change", () => seen && draw(seen));
addEventListener("resize", () => Object.entries(charts).forEach(([id, plot]) => plot.setSize({ width: $(id).clientWidth, height: 140 })));
look();

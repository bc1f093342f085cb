"""The page that shows a server: one document that loads nothing but the server's own figures.

All text that comes from the server is set as text, never as markup, and the policy lets no script, style or request be
but those that are here.
"""

from __future__ import annotations

import base64
import hashlib

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --accent: #2a78d0; --bad: #c3372b;
        --faint: light-dark(#5c6066, #a5aab1); }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.2rem; font: 15px/1.45 system-ui, sans-serif; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .3rem 1rem; }
h1 { font-size: 1.25rem; margin: 0; }
h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
#base { overflow-wrap: anywhere; }
#state { margin-left: auto; color: var(--faint); }
#state.bad { color: var(--bad); }
form { margin: 1.5rem 0; display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; }
input, button { font: inherit; padding: .35rem .6rem; border: 1px solid var(--line); border-radius: .3rem; }
input { min-width: 20rem; max-width: 100%; }
button { background: var(--accent); color: #fff; border-color: var(--accent); cursor: pointer; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .7rem; margin-top: 1rem; }
.tile { border: 1px solid var(--line); border-radius: .4rem; padding: .55rem .8rem; }
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--faint); font-size: .85rem; }
svg { width: 100%; height: 6rem; border: 1px solid var(--line); border-radius: .4rem; display: block; }
polyline { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.trained { stroke: var(--accent); } .sampled { stroke: #c77a12; }
.key { color: var(--faint); font-size: .85rem; margin: .2rem 0 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--faint); }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; }
[hidden] { display: none !important; }
"""

_SCRIPT = r"""
"use strict";
const $ = (id) => document.getElementById(id);
const SECONDS = 2, KEPT = 150;
let before = null, timer = 0;
const course = { trained: [], sampled: [] };

function short(value) {
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]])
    if (Math.abs(value) >= size) return (value / (unit === " k" ? 1e3 : size)).toFixed(2) + unit;
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 2 : 1);
}
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return value.toFixed(place ? 1 : 0) + " " + units[place];
}
function lasting(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = Math.max(0, parts.findIndex(([size]) => seconds >= size));
  const shown = parts.slice(seconds < 1 ? 3 : first, first + 2);
  return shown.map(([size, unit], place) =>
    `${Math.floor((place ? seconds % shown[0][0] : seconds) / size)} ${unit}`).join(" ");
}
function table(id, head, rows) {
  const made = document.createElement("table");
  for (const cells of [head, ...rows]) {
    const row = made.insertRow();
    for (const cell of cells) {
      const one = document.createElement(cells === head ? "th" : "td");
      one.textContent = cell;
      row.append(one);
    }
  }
  $(id).replaceChildren(made);
}
function tiles(found) {
  $("tiles").replaceChildren(...found.map(([name, value]) => {
    const tile = document.createElement("div"), number = document.createElement("b");
    const label = document.createElement("span");
    tile.className = "tile";
    number.textContent = value;
    label.textContent = name;
    tile.append(number, label);
    return tile;
  }));
}
function draw() {
  const most = Math.max(1, ...course.trained, ...course.sampled);
  for (const work of ["trained", "sampled"])
    $(work).setAttribute("points", course[work].map((value, place) =>
      `${place * 100 / (KEPT - 1)},${96 - 92 * value / most}`).join(" "));
  $("most").textContent = short(most);
}
function show(found) {
  const now = performance.now() / 1000, numbers = new Map();
  for (const one of found.families)
    for (const [labels, value] of one.samples)
      numbers.set(JSON.stringify([one.name, ...Object.values(labels)]), value);
  const of = (...key) => numbers.get(JSON.stringify(key)) ?? 0;
  const samples = (name) => (found.families.find((one) => one.name === name) ?? { samples: [] }).samples;
  const rate = (...key) => before === null ? 0 :
    Math.max(0, (of(...key) - (before.of(...key))) / (now - before.now));
  const sum = (name, keep = () => true) =>
    samples(name).reduce((total, [labels, value]) => total + (keep(labels) ? value : 0), 0);

  $("base").textContent = found.base;
  document.title = `${found.base} - Rankfold`;
  for (const work of ["trained", "sampled"]) {
    course[work].push(rate("tokens_total", work));
    course[work].splice(0, course[work].length - KEPT);
  }
  const busy = before === null ? 0 : (sum("busy_seconds_total") - before.busy) / (now - before.now);
  tiles([
    ["clients", short(of("clients"))], ["open sessions", short(of("sessions", "open"))],
    ["live models", short(of("models", "live"))], ["commands waiting", short(sum("waiting"))],
    ["tokens/s trained", short(rate("tokens_total", "trained"))],
    ["tokens/s sampled", short(rate("tokens_total", "sampled"))],
    ["busy", Math.round(100 * Math.min(1, Math.max(0, busy))) + " %"],
    ["adapters resident / resting", `${of("adapters", "resident")} / ${of("adapters", "resting")}`],
    ["journal", bytes(of("journal_bytes"))],
    ["running for", lasting(Math.max(0, Date.now() / 1000 - of("start_time_seconds")))],
  ]);
  draw();
  const kinds = new Set();
  for (const name of ["waiting", "commands_total", "busy_seconds_total"])
    for (const [labels] of samples(name)) kinds.add(labels.kind);
  table("commands", ["commands", "waiting", "done", "failed", "seconds"], [...kinds].sort().map((kind) => [
    kind, short(of("waiting", kind)), short(of("commands_total", kind, "done")),
    short(of("commands_total", kind, "failed")), of("busy_seconds_total", kind).toFixed(1),
  ]));
  const models = new Map(samples("model_rank").map(([labels, rank]) => [labels.model, rank]));
  for (const [labels] of samples("model_tokens_total"))
    if (!models.has(labels.model)) models.set(labels.model, "-");
  table("models", ["model", "rank", "trained", "per second", "sampled", "per second"],
    [...models].map(([model, rank]) => [
      model, rank, ...["trained", "sampled"].flatMap((work) =>
        [short(of("model_tokens_total", model, work)), short(rate("model_tokens_total", model, work))]),
    ]));
  table("memory", ["memory", "of the process", "on the device", "of"], [
    ["front", bytes(of("front_memory_bytes")), "", ""],
    ...samples("rank_memory_bytes").map(([labels, value]) => {
      const held = of("device_memory_bytes", labels.rank), total = of("device_memory_total_bytes", labels.rank);
      return [`rank ${labels.rank}`, bytes(value), total ? bytes(held) : "", total ? bytes(total) : ""];
    }),
  ]);
  before = { now, of, busy: sum("busy_seconds_total") };
}
function say(text, bad) {
  $("state").textContent = text;
  $("state").className = bad ? "bad" : "";
}
async function look() {
  clearTimeout(timer);
  const key = sessionStorage.getItem("key");
  $("ask").hidden = key !== null;
  $("figures").hidden = key === null;
  if (key === null) return;
  try {
    const answer = await fetch("metrics.json", { headers: { Authorization: "Bearer " + key }, cache: "no-store" });
    if (answer.status === 401) {
      sessionStorage.removeItem("key");
      before = null;
      say("this is not the key of who watches", true);
      return look();
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const found = await answer.json();
    show(found);
    say("as of " + new Date().toLocaleTimeString() + (found.waits_for ? `: ${found.waits_for}` : ""), found.waits_for);
  } catch (error) {
    say(`no answer (${error.message}); trying again`, true);
  }
  timer = setTimeout(look, 1000 * SECONDS);
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value.trim());
  $("key").value = "";
  say("", false);
  look();
});
look();
"""

PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rankfold</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>Rankfold server</h1><span id="base"></span><span id="state" role="status"></span></header>
<form id="ask" hidden>
<label for="key">Key of who watches</label>
<input id="key" type="password" autocomplete="off" required>
<button type="submit">Show</button>
</form>
<main id="figures" hidden>
<div id="tiles" class="tiles"></div>
<h2>Tokens per second</h2>
<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="tokens per second, trained and sampled">
<polyline id="trained" class="trained"/><polyline id="sampled" class="sampled"/></svg>
<p class="key">trained blue, sampled orange, five minutes; highest <span id="most"></span></p>
<h2>Commands</h2><div id="commands" class="scroll"></div>
<h2>Adapters</h2><div id="models" class="scroll"></div>
<h2>Memory</h2><div id="memory" class="scroll"></div>
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""
"""The document."""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        f"style-src {_hash(_STYLE)}",
        f"script-src {_hash(_SCRIPT)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
"""What the page may load and do: its own style and script, by their hashes, and requests to this server."""

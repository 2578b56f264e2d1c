// The page at `/`. In: what is typed, and the server's /v1 and /stats; out: a chat that streams, and live metrics.
"use strict";

const $ = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const SVG = "http://www.w3.org/2000/svg";
const settings = $("settings");
const messages = []; // the conversation, as the API takes it
let served = { model: null, chat: true };
let asking = null; // AbortController of the answer that is growing
let conversation = 0; // counts them, so that an answer knows whether its own is still the one on the page

// -- settings, kept in this browser; the key only as long as the tab ------------------------------------------

const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"];

function restoreSettings() {
  const kept = JSON.parse(localStorage.getItem("ttpu-settings") || "{}");
  for (const [name, value] of Object.entries(kept)) fill(name, value);
  settings.elements.key.value = sessionStorage.getItem("ttpu-key") || "";
}

function fill(name, value) {
  // namedItem: as properties there are also `length`, and each element by its number, the key's among them.
  const field = settings.elements.namedItem(name);
  if (field && field !== settings.elements.key) field.value = value;
}

function keepSettings() {
  const { key, ...rest } = Object.fromEntries(new FormData(settings));
  localStorage.setItem("ttpu-settings", JSON.stringify(rest));
  sessionStorage.setItem("ttpu-key", key || "");
}

function asked() {
  const fields = { model: $("models").value || served.model, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    const text = settings.elements[name].value;
    if (text !== "" && Number.isFinite(Number(text))) fields[name] = Number(text);
  }
  if (settings.elements.stop.value) fields.stop = [settings.elements.stop.value];
  return fields;
}

function headers() {
  const key = settings.elements.key.value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// -- text: fenced code, inline code and bold; everything else stays text, so that nothing in an answer is markup ---

function render(target, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  const blocks = parts.map((part, number) =>
    number % 2 ? make("pre", {}, make("code", {}, part.replace(/\n$/, ""))) : paragraphs(part.replace(/^\n|\n$/g, "")));
  target.replaceChildren(...blocks.flat());
  if (!target.firstChild) target.append(make("p"));
}

function paragraphs(text) {
  if (text === "") return [];
  return text.split(/\n{2,}/).map((lines) => {
    const pieces = lines.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/);
    return make("p", {}, ...pieces.map((piece) =>
      piece.startsWith("`") && piece.length > 2 && piece.endsWith("`") ? make("code", {}, piece.slice(1, -1))
      : piece.startsWith("**") && piece.length > 4 && piece.endsWith("**") ? make("strong", {}, piece.slice(2, -2))
      : piece));
  });
}

// -- the chat -----------------------------------------------------------------------------------------------------

function addTurn(role, text) {
  $("welcome").hidden = true;
  const words = make("div", { class: "words" });
  const turn = make("article", { class: `turn ${role}` }, words);
  render(words, text);
  $("turns").append(turn);
  scrollDown(true);
  return { turn, words };
}

function scrollDown(force) {
  const turns = $("turns");
  if (force || turns.scrollHeight - turns.scrollTop - turns.clientHeight < 120) turns.scrollTop = turns.scrollHeight;
}

async function ask(text) {
  if (asking || !text.trim()) return;
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  await answer();
}

async function answer() {
  const { turn, words } = addTurn("assistant growing", "");
  const mine = { number: conversation, controller: new AbortController() };
  asking = mine.controller;
  busy(true);
  const began = performance.now();
  const got = { text: "", thought: "", first: null, usage: null, reason: null, error: null };
  let drawn = false;
  const thoughts = make("pre");
  const draw = () => {
    drawn = false;
    if (got.thought && !thoughts.parentNode)
      words.before(make("details", { class: "thoughts" }, make("summary", {}, "Reasoning"), thoughts));
    thoughts.textContent = got.thought;
    render(words, got.text);
    scrollDown();
  };
  try {
    for await (const event of stream(mine.controller.signal)) {
      if (event.error) throw new Error(event.error.message);
      got.usage = event.usage || got.usage;
      const choice = event.choices && event.choices[0];
      if (!choice) continue;
      const piece = choice.text ?? choice.delta?.content ?? "";
      const thought = choice.delta?.reasoning_content ?? "";
      if ((piece || thought) && got.first === null) got.first = performance.now();
      got.text += piece;
      got.thought += thought;
      got.reason = choice.finish_reason || got.reason;
      if (!drawn) { drawn = true; requestAnimationFrame(draw); }
    }
  } catch (error) {
    if (error.name === "AbortError") got.reason = "stopped";
    else got.error = error.message;
  }
  if (mine.number !== conversation) return; // its turn is gone, and what is growing by now is another's
  asking = null;
  busy(false);
  turn.classList.remove("growing");
  draw();
  if (got.error) { turn.classList.add("failed"); words.append(make("p", { role: "alert" }, got.error)); }
  if (got.text || !got.error) messages.push({ role: "assistant", content: got.text });
  else messages.pop(); // the question was not answered, so that the next one must not follow it
  turn.append(summary(got, began));
  turn.dataset.reason = got.reason || "error";
  scrollDown();
}

function summary(got, began) {
  const facts = make("footer");
  const now = performance.now();
  if (got.usage) {
    const tokens = got.usage.completion_tokens;
    facts.append(make("span", {}, `${tokens} tokens`));
    if (got.first && tokens > 1) facts.append(make("span", {}, `${((tokens - 1) / ((now - got.first) / 1000)).toFixed(1)} tokens/s`));
  }
  if (got.first) facts.append(make("span", {}, `first after ${seconds((got.first - began) / 1000)}`));
  if (got.reason === "length") facts.append(make("span", {}, "cut at the limit"));
  if (got.reason === "stopped") facts.append(make("span", {}, "stopped"));
  const copy = make("button", { type: "button" }, "Copy");
  copy.onclick = () => navigator.clipboard?.writeText(got.text).then(() => { copy.textContent = "Copied"; });
  facts.append(copy);
  return facts;
}

async function* stream(signal) {
  const fields = asked();
  const system = settings.elements.system.value;
  const path = served.chat ? "v1/chat/completions" : "v1/completions";
  if (served.chat) fields.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
  else fields.prompt = messages[messages.length - 1].content;
  if (!served.chat && fields.max_tokens === undefined) fields.max_tokens = 256;
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(fields), signal });
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new Error(told?.error?.message || `the server answered with status ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  if (!on) $("prompt").focus();
}

function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

// -- live metrics ----------------------------------------------------------------------------------------------------

const POINTS = 90;
const CHARTS = [
  ["running", "Running", (now) => now.engine.running, (value) => value.toFixed(0)],
  ["waiting", "Waiting", (now) => now.engine.waiting, (value) => value.toFixed(0)],
  ["speed", "Tokens/s out", (now, before) => rate(now, before, "output_tokens"), (value) => short(value)],
  ["input", "Tokens/s in", (now, before) => rate(now, before, "prompt_tokens"), (value) => short(value)],
  ["kv", "KV cache", (now) => now.engine.kv_usage, percent, 1],
  ["ttft", "First token", (now) => now.ttft_p50, seconds],
  ["mbu", "MBU", (now) => now.mbu, percent, 1],
  ["mfu", "MFU", (now) => now.mfu, percent, 1],
];
const history = new Map(CHARTS.map(([name]) => [name, []]));
let before = null;

function rate(now, then, name) {
  const passed = then ? now.time - then.time : 0;
  return passed > 0 ? Math.max(0, (now.engine[name] - then.engine[name]) / passed) : 0;
}
function percent(value) { return `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`; }
function seconds(value) { return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(1)} s`; }
function short(value) { return value >= 10000 ? `${(value / 1000).toFixed(0)}k` : value.toFixed(value < 10 ? 1 : 0); }

function chart(name, title) {
  const found = $(`chart-${name}`);
  if (found) return found;
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  for (const kind of ["area", "line"]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", kind);
    svg.append(path);
  }
  const box = make("div", { class: "chart", id: `chart-${name}` }, make("h3", {}, title), make("output"), svg);
  $("charts").append(box);
  return box;
}

function draw(box, values, text, most) {
  box.querySelector("output").textContent = text;
  const top = most || Math.max(...values, 1e-9) * 1.1;
  const start = POINTS - values.length;
  const points = values.map((value, at) => `${start + at},${(98 - 94 * Math.min(value / top, 1)).toFixed(1)}`);
  box.querySelector(".line").setAttribute("d", `M${points.join("L")}`);
  box.querySelector(".area").setAttribute("d", `M${start},100L${points.join("L")}L${POINTS - 1},100Z`);
}

function show(now) {
  for (const [name, title, value, written, most] of CHARTS) {
    const found = value(now, before);
    if (found === null || found === undefined) continue;
    const values = history.get(name);
    values.push(found);
    if (values.length > POINTS) values.shift();
    draw(chart(name, title), values, written(found), most);
  }
  const engine = now.engine;
  const facts = [
    ["Requests", engine.requests], ["Tokens in", engine.prompt_tokens], ["Tokens out", engine.output_tokens],
    ["Prefix cache hits", engine.prefix_queries ? percent(engine.prefix_hits / engine.prefix_queries) : "–"],
    ...(engine.drafted ? [["Drafts accepted", percent(engine.accepted / engine.drafted)]] : []),
    ["Preemptions", engine.preemptions], ["Recompiles", engine.recompiles], ["Context", now.max_model_len],
  ];
  $("facts").replaceChildren(...facts.flatMap(([name, value]) =>
    [make("dt", {}, name), make("dd", {}, typeof value === "number" ? value.toLocaleString("en") : value)]));
  before = now;
}

async function poll() {
  try {
    const response = await fetch("stats", { headers: headers() });
    if (!response.ok) throw new Error(String(response.status));
    const now = await response.json();
    served = now;
    $("model").textContent = now.model;
    document.title = `${now.model} · TTPU`;
    listModels([now.model, ...now.adapters]);
    $("key-row").hidden = !now.needs_key;
    if (!now.chat) $("hint").textContent = "This model has no chat template: it goes on from your text. Enter sends, Esc stops.";
    setState(now.engine.asleep ? "asleep" : "ready", now.engine.asleep ? "" : "up");
    show(now);
  } catch {
    setState("not reachable", "down");
  }
}

function setState(text, kind) {
  $("state").textContent = text;
  $("state").className = `state ${kind}`;
}

function listModels(names) {
  const list = $("models");
  list.hidden = names.length < 2;
  $("model").hidden = names.length > 1;
  if (names.join("\n") === [...list.options].map((option) => option.value).join("\n")) return;
  list.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
}

// -- wiring ------------------------------------------------------------------------------------------------------------

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (asking || !text.trim()) return;
  $("prompt").value = "";
  grow();
  ask(text);
};
$("prompt").oninput = grow;
$("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
};
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && asking) asking.abort(); });
$("stop").onclick = () => asking && asking.abort();
$("new").onclick = () => {
  if (asking) asking.abort();
  conversation += 1;
  asking = null;
  busy(false);
  messages.length = 0;
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  $("welcome").hidden = false;
  $("prompt").focus();
};
$("panel-toggle").onclick = () => {
  const narrow = document.body.classList.toggle("narrow");
  $("panel-toggle").setAttribute("aria-expanded", String(!narrow));
};
settings.oninput = keepSettings;
settings.onsubmit = (event) => event.preventDefault();
settings.onreset = () => setTimeout(keepSettings);

restoreSettings();
if (matchMedia("(max-width: 760px)").matches) $("panel-toggle").click();
const query = new URLSearchParams(location.search);
for (const [name, value] of query) fill(name, value);
poll().then(() => {
  const text = query.get("prompt");
  if (text === null) return;
  $("prompt").value = text;
  grow();
  // A link from anywhere must not spend a key that is kept here.
  if (query.get("autosend") === "1" && !settings.elements.key.value) $("ask").requestSubmit();
});
setInterval(poll, 1000);

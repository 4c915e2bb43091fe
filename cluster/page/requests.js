// The last requests as timelines: what each waited for, was computed by, and when its KV moved.

import { attribute, byId, element, figure, list, say } from "./elements.js";
import * as format from "./format.js";

const MOST = 50;
const MOST_LANES = 4;
const LANE_PIXELS = 16;
const PHASES = ["queue", "prefill", "transfer", "decode"];

const known = new Map(); // by id
const open = new Set();
let onChange = () => {};

export function onRequestsChanged(callback) {
  onChange = callback;
  byId("same-scale").addEventListener("change", () => onChange());
}

// Front ends that share a port keep a journal each, and any of them may have answered: what ended before is kept.
export function rememberRequests(latest) {
  const ended = [...known.values()].filter((request) => request.status !== "running");
  const all = new Map([...ended, ...latest].map((request) => [request.request_id, request]));
  known.clear();
  for (const request of [...all.values()].sort((a, b) => b.began - a.began).slice(0, MOST)) {
    known.set(request.request_id, request);
  }
  for (const id of open) if (!known.has(id)) open.delete(id);
}

export function showRequests(chosen) {
  const has = (names) => names.split(",").includes(chosen);
  const wanted = [...known.values()].filter(
    (request) => chosen === null || has(request.decode_replica) || has(request.prefill_replica),
  );
  const longest = Math.max(...wanted.map((request) => request.duration_ms));
  const sameScale = byId("same-scale").checked;
  const rows = wanted.flatMap((request) => {
    const row = { request, scale: Math.max(1e-3, sameScale ? longest : request.duration_ms), details: false };
    return open.has(request.request_id) ? [row, { ...row, details: true }] : [row];
  });
  list(byId("requests"), rows, ({ request, details }) => `${request.request_id} ${details}`, (row) =>
    row.details ? detailsView() : rowView(row.request.request_id));
  say(byId("requests-note"), wanted.length > 0 ? "" : chosen === null ? "No request yet." : `No request of ${chosen}.`);
}

const milliseconds = (value) => format.duration(value / 1000);
const shortId = (id) => id.slice(id.indexOf("-") + 1).slice(-8);

// How it ended: a mark, words, and whether that is good.
function ending({ status, http_status: code }) {
  if (status === "running") return { text: "○ running", kind: "quiet" };
  if (status === "finished") return { text: `✓ ${code}`, kind: "good" };
  return { text: status === "aborted" ? "✕ left" : `✕ ${code}`, kind: "bad" };
}

function rowView(id) {
  const cell = (name, ...children) => element("td", { role: "cell", class: name }, ...children);
  const began = element("time");
  const disclose = element("button", { type: "button", class: "disclose mono", title: id }, shortId(id));
  const ended = element("data");
  const prompt = element("data");
  const cached = element("span", { class: "quiet" });
  const generated = element("data");
  const sent = element("data");
  const took = element("data");
  const timeline = element("div", { class: "timeline", role: "img" });
  disclose.addEventListener("click", () => {
    if (!open.delete(id)) open.add(id);
    onChange();
  });
  const node = element(
    "tr",
    { role: "row" },
    cell("began", began),
    cell("id", disclose),
    cell("ended", ended),
    cell("prompt number", cached, prompt),
    cell("generated number", generated),
    cell("kv number", sent),
    cell("took number", took),
    cell("wide", timeline),
  );
  return {
    node,
    show({ request, scale }) {
      const { text, kind } = ending(request);
      say(began, format.clock(new Date(request.began * 1000)));
      attribute(disclose, "aria-expanded", open.has(id));
      figure(ended, request.http_status, text, request.status === "aborted" ? "the client left" : request.status);
      attribute(ended, "class", kind);
      figure(prompt, request.prompt_tokens, format.count(request.prompt_tokens));
      say(cached, request.cached_tokens > 0 ? `${format.count(request.cached_tokens)} cached of ` : "");
      figure(generated, request.completion_tokens, format.count(request.completion_tokens));
      figure(sent, request.payload_bytes, format.bytes(request.payload_bytes), format.exactBytes(request.payload_bytes));
      figure(took, request.duration_ms, milliseconds(request.duration_ms));
      showTimeline(timeline, request.phases, scale);
    },
  };
}

// A lane for each prompt of a batch, the transfer below what is computed meanwhile.
function showTimeline(timeline, phases, scale) {
  const drawn = phases.filter((phase) => phase.prompt < MOST_LANES);
  const lanes = 1 + Math.max(0, ...drawn.map((phase) => phase.prompt));
  const height = `${lanes * LANE_PIXELS}px`;
  if (timeline.style.height !== height) timeline.style.height = height;
  attribute(timeline, "aria-label", drawn.map(phaseText).join(", ") || "not begun");
  list(timeline, drawn.map((phase, index) => ({ phase, index, scale })), ({ index }) => index, phaseView);
}

const phaseText = ({ name, begin_ms: begin, end_ms: end }) => `${name} ${milliseconds(end - begin)}`;
const phasePlace = ({ replica, source }) => (source ? `from ${source} to ${replica}` : replica ? `on ${replica}` : "");

function phaseView() {
  const node = element("span");
  return {
    node,
    show({ phase, scale }) {
      const { name, begin_ms: begin, end_ms: end, prompt } = phase;
      attribute(node, "class", `phase ${PHASES.includes(name) ? name : "retry"}`);
      attribute(node, "title", `${phaseText(phase)} ${phasePlace(phase)}`);
      const part = (value) => `${((100 * value) / scale).toFixed(2)}%`;
      const place = { left: part(begin), width: part(end - begin), "--lane": prompt };
      for (const [property, value] of Object.entries(place)) {
        if (node.style.getPropertyValue(property) !== String(value)) node.style.setProperty(property, value);
      }
    },
  };
}

function detailsView() {
  const facts = element("dl", { class: "facts" });
  return {
    node: element("tr", { role: "row", class: "details" }, element("td", { role: "cell", colspan: 8 }, facts)),
    show: ({ request }) => list(facts, factsOf(request), ([term]) => term, factView),
  };
}

function factView([term]) {
  const value = element("dd");
  return { node: element("div", {}, element("dt", {}, term), value), show: ([, text]) => say(value, text) };
}

function factsOf(request) {
  const saved = Math.max(0, request.unshared_bytes - request.payload_bytes);
  const phases = request.phases
    .filter((phase) => phase.prompt < MOST_LANES)
    .map((phase, index) => [
      `${index + 1}. ${phase.name}`,
      `${milliseconds(phase.begin_ms)} to ${milliseconds(phase.end_ms)} ${phasePlace(phase)}`,
    ]);
  return [
    ["In a terminal", `crosskv trace ${request.request_id}`],
    ["Route", request.route],
    ["Ended", request.status],
    ["Choices", format.count(request.choices)],
    ["Decode replica", request.decode_replica || "–"],
    ["Prefill replica", request.prefill_replica || "none"],
    ["KV sent", format.exactBytes(request.payload_bytes)],
    ["Saved by sharing", format.exactBytes(saved)],
    ["Sent again", format.exactBytes(request.retransmitted_bytes)],
    ["Attempts, resumptions", `${request.attempts}, ${request.resumptions}`],
    ["Cached on decode", `${format.count(request.cached_tokens)} tokens`],
    ["Cached on prefill", `${format.count(request.prefill_cached_tokens)} tokens`],
    ["First token", request.first_token_ms === null ? "none" : `after ${milliseconds(request.first_token_ms)}`],
    ...phases,
  ];
}

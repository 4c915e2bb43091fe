// Replicas by role as tiles, the one that is chosen in full, and what keeps any of them from working.

import { attribute, byId, element, figure, hide, list, say, width } from "./elements.js";
import * as format from "./format.js";

const ROLES = { prefill: "Prefill", decode: "Decode", colocated: "Colocated" };
const COMPACT_FROM = 17;
const MISSED_SECONDS = 60;
const STATES = {
  ready: { glyph: "●", word: "ready" },
  draining: { glyph: "◐", word: "draining" },
  full: { glyph: "▲", word: "queue full" },
  alone: { glyph: "✕", word: "no prefill replica" },
  silent: { glyph: "?", word: "does not report" },
};

const seen = new Map(); // by name: {replica, at}
let chosen = null;
let onChoice = () => {};

export const chosenReplica = () => chosen;

export function onReplicaChosen(callback) {
  onChoice = callback;
}

export function showReplicas(reported, now) {
  for (const replica of reported) seen.set(replica.replica_id, { replica, at: now });
  for (const [name, { at }] of seen) if (now - at > MISSED_SECONDS) seen.delete(name);
  if (!seen.has(chosen)) chosen = null;
  const items = [...seen.values()].map(({ replica, at }) => ({ ...replica, state: stateOf(replica, at < now) }));
  items.sort((a, b) => a.replica_id.localeCompare(b.replica_id));
  const roles = Object.keys(ROLES)
    .map((role) => ({ role, replicas: items.filter((item) => item.role === role) }))
    .filter(({ replicas }) => replicas.length > 0);
  list(byId("roles"), roles, ({ role }) => role, roleView);
  showProblems(items);
  showChosen(items.find((item) => item.replica_id === chosen));
}

function stateOf({ role, load }, silent) {
  if (silent) return STATES.silent;
  if (load.draining) return STATES.draining;
  if (role === "decode" && load.prefill_peers === 0) return STATES.alone;
  if (load.queue_limit > 0 && load.waiting_requests >= load.queue_limit) return STATES.full;
  return STATES.ready;
}

function roleView({ role }) {
  const title = element("h3");
  const summary = element("p", { class: "quiet small" });
  const tiles = element("ul", { class: "tiles", role: "listbox", "aria-label": `${ROLES[role]} replicas` });
  tiles.addEventListener("keydown", (event) => move(tiles, event));
  tiles.addEventListener("focusin", (event) => makeStop(tiles, event.target));
  return {
    node: element("div", { class: "role" }, element("div", { class: "title" }, title, summary), tiles),
    show({ replicas }) {
      say(title, `${ROLES[role]} · ${format.count(replicas.length)}`);
      say(summary, summaryOf(role, replicas));
      tiles.classList.toggle("compact", replicas.length >= COMPACT_FROM);
      list(tiles, replicas, (replica) => replica.replica_id, tileView);
      if (![...tiles.children].some((option) => option.tabIndex === 0)) makeStop(tiles, tiles.firstElementChild);
    },
  };
}

const queueOf = (role, { running, receiving, waiting }) =>
  `${format.count(running)} ${role === "prefill" ? "computing" : "running"}, ` +
  `${role === "prefill" ? "" : `${format.count(receiving)} receiving, `}${format.count(waiting)} waiting`;

// Their work in sum, and how many of them are not ready.
function summaryOf(role, replicas) {
  const total = (name) => replicas.reduce((sum, { load }) => sum + load[name], 0);
  const work = queueOf(role, {
    running: total("running_requests"), receiving: total("receiving_requests"), waiting: total("waiting_requests"),
  });
  const states = Object.values(STATES)
    .map((state) => ({ ...state, times: replicas.filter((replica) => replica.state === state).length }))
    .filter(({ times, word }) => times > 0 && word !== STATES.ready.word)
    .map(({ glyph, word, times }) => `${glyph} ${times} ${word}`);
  const numbers = replicas.length >= COMPACT_FROM ? [role === "prefill" ? "tiles: computing + waiting" : "tiles: running + waiting"] : [];
  return [work, ...states, ...numbers].join(" · ");
}

function tileView({ replica_id: name, role }) {
  const glyph = element("span", { class: "glyph", "aria-hidden": "true" });
  const label = element("span", { class: "name" }, format.shortName(name));
  const state = element("span", { class: "word" });
  const work = element("span", { class: "work" });
  const held = element("span", { class: "held" });
  const cached = element("span", { class: "cached" });
  const blocks = element("span", { class: "blocks" });
  const short = element("span", { class: "short", "aria-hidden": "true" });
  const node = element(
    "li",
    { role: "option", tabindex: -1, "data-name": name },
    element("span", { class: "head" }, glyph, label, state, short),
    work,
    element("span", { class: "bar", "aria-hidden": "true" }, held, cached),
    blocks,
  );
  node.addEventListener("click", () => choose(name));
  return {
    node,
    show(replica) {
      const { load, held_blocks: heldBlocks } = replica;
      const total = Math.max(1, load.total_blocks);
      attribute(node, "aria-selected", name === chosen);
      attribute(node, "data-state", replica.state.word);
      say(glyph, replica.state.glyph);
      say(state, replica.state.word);
      const queue = queueOf(role, {
        running: load.running_requests, receiving: load.receiving_requests, waiting: load.waiting_requests,
      });
      say(work, queue);
      say(short, `${load.running_requests}+${load.waiting_requests}`);
      width(held, heldBlocks / total);
      width(cached, load.cached_blocks / total);
      const use = `${format.percent(heldBlocks, total)} held, ${format.percent(load.cached_blocks, total)} cached`;
      say(blocks, use);
      const whole = `${name}: ${replica.state.word}. ${queue}. KV blocks: ${use}.`;
      attribute(node, "aria-label", whole);
      attribute(node, "title", whole);
    },
  };
}

function choose(name) {
  chosen = chosen === name ? null : name;
  onChoice();
}

// Tab stops once in a list: at the tile where the focus was last.
function makeStop(tiles, stop) {
  for (const option of tiles.children) attribute(option, "tabindex", option === stop ? 0 : -1);
}

// Arrow keys walk over the tiles as they lie; Enter and Space choose; Escape lets go.
function move(tiles, event) {
  const options = [...tiles.children];
  const at = options.indexOf(document.activeElement);
  if (at < 0) return;
  const columns = options.filter((option) => option.offsetTop === options[0].offsetTop).length;
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -at, End: options.length - 1 - at };
  if (event.key === "Enter" || event.key === " ") choose(options[at].dataset.name);
  else if (event.key === "Escape" && chosen !== null) choose(chosen);
  else if (event.key in steps) {
    const next = options[at + steps[event.key]];
    if (next === undefined) return;
    next.focus();
  } else return;
  event.preventDefault();
}

function showProblems(replicas) {
  const problems = replicas.filter((replica) => replica.prefill_error !== "");
  list(byId("problems"), problems, (replica) => replica.replica_id, () => {
    const node = element("li");
    return {
      node,
      show: (replica) => say(node, `${replica.replica_id} cannot use a prefill replica: ${replica.prefill_error}`),
    };
  });
}

function showChosen(replica) {
  const panel = byId("replica");
  hide(panel, replica === undefined);
  list(panel, replica === undefined ? [] : [replica], (one) => one.replica_id, chosenView);
}

function chosenView({ replica_id: name }) {
  const facts = element("dl", { class: "facts" });
  const close = element("button", { type: "button" }, "Show all again");
  close.addEventListener("click", () => choose(name));
  const node = element("div", {}, element("div", { class: "title" }, element("h3", {}, name), close), facts);
  return { node, show: (replica) => list(facts, factsOf(replica), ([term]) => term, factView) };
}

function factView([term]) {
  const value = element("data");
  return {
    node: element("div", {}, element("dt", {}, term), element("dd", {}, value)),
    show: ([, raw, text]) => figure(value, raw, text),
  };
}

function factsOf({ state, load, counters, held_blocks: held, block_size: size, owner_layers: owners, total_layers: layers }) {
  const number = (term, value) => [term, value, format.count(value)];
  const amount = (term, value) => [term, value, format.bytes(value)];
  return [
    ["State", state.word, state.word],
    ["Layers with KV", owners, `${owners} of ${layers}`],
    number("Tokens per block", size),
    number("Blocks held", held),
    number("Blocks cached", load.cached_blocks),
    number("Blocks free", load.free_blocks),
    number("Blocks in all", load.total_blocks),
    number("Prompt tokens ahead", load.outstanding_prompt_tokens),
    number("Prompt tokens", counters.prompt_tokens),
    number("Generated tokens", counters.generated_tokens),
    ["Found in prefix cache", counters.prefix_hits, format.percent(counters.prefix_hits, counters.prefix_queries)],
    number("Requests finished", counters.requests_finished),
    number("Requests aborted", counters.requests_aborted),
    number("Requests failed", counters.requests_failed),
    number("Requests refused", counters.requests_refused),
    number("Preemptions", counters.preemptions),
    number("Prompts computed here", counters.local_prefills),
    number("Transfers", counters.transfers),
    number("Transfers failed", counters.transfers_failed),
    amount("KV payload", counters.payload_bytes),
    amount("Of complete transfers", counters.completed_bytes),
    amount("Lower bound", counters.lower_bound_bytes),
    amount("Without sharing", counters.unshared_bytes),
    amount("Sent again", counters.retransmitted_bytes),
    amount("On the wire", counters.wire_bytes),
    ["Time in transfers", counters.transfer_seconds, format.duration(counters.transfer_seconds)],
    ["Time in steps", counters.busy_seconds, format.duration(counters.busy_seconds)],
    number("Steps", counters.steps),
  ];
}

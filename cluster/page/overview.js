// The figures on top: sums over replicas, and how fast the sums grow.

import { attribute, byId, figure, say } from "./elements.js";
import * as format from "./format.js";

const MOMENTS = 150;
const RATE_SECONDS = 10;

const moments = []; // {at, generated, prompts}, newest last; at in seconds

// The figures that /cluster sums up to. Work is counted where requests live: a decode replica's prompt is what its
// prefill replica computes, and what one sends the other receives.
function totals(replicas) {
  const sums = {
    running: 0, receiving: 0, waiting: 0, generated: 0, prompts: 0, queries: 0, hits: 0, sent: 0, saved: 0,
  };
  for (const { role, load, counters } of replicas) {
    if (role === "prefill") continue;
    sums.running += load.running_requests;
    sums.receiving += load.receiving_requests;
    sums.waiting += load.waiting_requests;
    sums.generated += counters.generated_tokens;
    sums.prompts += counters.prompt_tokens;
    sums.queries += counters.prefix_queries;
    sums.hits += counters.prefix_hits;
    sums.sent += counters.completed_bytes;
    sums.saved += counters.unshared_bytes - counters.lower_bound_bytes;
  }
  return sums;
}

export function showReplicaFigures(replicas, now) {
  const sums = totals(replicas);
  const rates = remember(sums, now);
  for (const [id, rate] of [["generated-rate", rates?.generated], ["prompt-rate", rates?.prompts]]) {
    figure(byId(id), rate ?? "", rate === undefined ? "–" : format.rate(rate));
  }
  for (const id of ["running", "receiving", "waiting"]) figure(byId(id), sums[id], format.count(sums[id]));
  figure(byId("hit-share"), sums.hits, format.percent(sums.hits, sums.queries), `${format.count(sums.hits)} of ${format.count(sums.queries)} tokens`);
  figure(byId("kv-sent"), sums.sent, format.bytes(sums.sent), format.exactBytes(sums.sent));
  figure(byId("kv-saved"), sums.saved, format.bytes(sums.saved), format.exactBytes(sums.saved));
  draw();
}

export function showLatency(latency) {
  for (const [id, name] of [["ttft", "time_to_first_token"], ["itl", "inter_token_latency"]]) {
    for (const quantile of ["p50", "p90", "p99"]) {
      const value = latency[name][quantile];
      figure(byId(`${id}-${quantile}`), value ?? "", value === null ? "–" : format.duration(value));
    }
  }
  const requests = latency.time_to_first_token.count;
  const since = latency.seconds < 290 ? "since this front end started" : "of the last 5 minutes";
  say(
    byId("overview-note"),
    `Latencies: ${format.count(requests)} ${requests === 1 ? "request" : "requests"} ${since}, as this front end saw them. ` +
      "Bytes and cache hits: since the replicas started.",
  );
}

// Tokens per second over the last seconds. A replica that leaves takes its counts with it: that moment begins anew.
function remember(sums, now) {
  const last = moments.at(-1);
  if (last && (sums.generated < last.generated || sums.prompts < last.prompts)) moments.length = 0;
  const base = moments.findLast((moment) => moment.at <= now - RATE_SECONDS) ?? moments[0];
  const rates = base && {
    generated: (sums.generated - base.generated) / (now - base.at),
    prompts: (sums.prompts - base.prompts) / (now - base.at),
  };
  moments.push({ at: now, generated: sums.generated, prompts: sums.prompts, rate: rates?.generated ?? 0 });
  if (moments.length > MOMENTS) moments.shift();
  return rates;
}

function draw() {
  const highest = Math.max(1, ...moments.map((moment) => moment.rate));
  const first = MOMENTS - moments.length + 1;
  // Nothing moves while nothing happens.
  const idle = moments.every((moment) => moment.rate === 0);
  const points = (idle ? [] : moments.slice(1)).map((moment, index) => `${first + index},${(23 - (22 * moment.rate) / highest).toFixed(1)}`);
  attribute(byId("trend").firstElementChild, "points", points.join(" "));
}

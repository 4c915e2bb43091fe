// What KV went from which prefill to which decode replica, and what sharing saved of it. The largest flows are shown one
// by one; the sum of all rows is what decode replicas have received.

import { byId, element, figure, list, say, width } from "./elements.js";
import * as format from "./format.js";

const MOST = 12;

export function showFlows(replicas, chosen) {
  const receivers = replicas.filter((replica) => replica.role === "decode");
  const flows = receivers.flatMap((decode) =>
    decode.prefill_transfers
      .filter((flow) => flow.transfers > 0)
      .map((flow) => ({
        prefill: flow.prefill_replica,
        decode: decode.replica_id,
        transfers: flow.transfers,
        sent: flow.payload_bytes,
        saved: flow.unshared_bytes - flow.payload_bytes,
      })),
  );
  const wanted = chosen === null ? flows : flows.filter((flow) => flow.prefill === chosen || flow.decode === chosen);
  wanted.sort((a, b) => b.sent - a.sent || (a.prefill + a.decode).localeCompare(b.prefill + b.decode));
  const rows = wanted.slice(0, MOST);
  const others = wanted.slice(MOST);
  if (others.length > 0) rows.push({ ...sum(others), name: `${format.count(others.length)} more pairs` });
  if (chosen === null) rows.push(...unassigned(receivers, flows));
  const longest = Math.max(1, ...rows.filter((row) => row.name === undefined).map((row) => row.sent + row.saved));
  list(byId("flows"), rows.map((row) => ({ ...row, longest })), (row) => row.name ?? `${row.prefill} ${row.decode}`, rowView);
  say(byId("flows-note"), note(receivers, chosen));
}

const sum = (flows) => ({
  transfers: flows.reduce((total, flow) => total + flow.transfers, 0),
  sent: flows.reduce((total, flow) => total + flow.sent, 0),
  saved: flows.reduce((total, flow) => total + flow.saved, 0),
});

// A pair counts as long as both are there; the decode replica goes on counting.
function unassigned(receivers, flows) {
  const all = sum(
    receivers.map(({ counters }) => ({
      transfers: counters.transfers,
      sent: counters.completed_bytes,
      saved: counters.unshared_bytes - counters.lower_bound_bytes,
    })),
  );
  const known = sum(flows);
  if (all.transfers <= known.transfers) return [];
  return [{
    name: "From prefill replicas that are gone",
    transfers: all.transfers - known.transfers,
    sent: all.sent - known.sent,
    saved: all.saved - known.saved,
  }];
}

function note(receivers, chosen) {
  if (receivers.length === 0) return "No decode replica reports, so there is nobody to send to.";
  if (chosen !== null) return `Only ${chosen}.`;
  const total = (name) => receivers.reduce((all, { counters }) => all + counters[name], 0);
  if (total("transfers") === 0) return "Nothing was sent yet.";
  const again = total("retransmitted_bytes");
  return `${format.bytes(total("lower_bound_bytes"))} had to move; if every layer had KV of its own, ` +
    `${format.bytes(total("unshared_bytes"))}.${again > 0 ? ` ${format.bytes(again)} more came with transfers that failed.` : ""}`;
}

function rowView(row) {
  const cell = (attributes, ...children) => element("td", { role: "cell", ...attributes }, ...children);
  const names = row.name === undefined
    ? [
        cell({ class: "mono", title: row.prefill }, format.shortName(row.prefill)),
        cell({ class: "mono", title: row.decode }, element("span", { class: "arrow", "aria-hidden": "true" }, "→ "), format.shortName(row.decode)),
      ]
    : [cell({ class: "quiet", colspan: 2 }, row.name)];
  const transfers = element("data");
  const sent = element("data");
  const saved = element("data");
  const sentBar = element("span", { class: "sent" });
  const savedBar = element("span", { class: "saved" });
  const drawn = row.name === undefined ? [element("span", { class: "bar", "aria-hidden": "true" }, sentBar, savedBar)] : [];
  const node = element(
    "tr",
    { role: "row" },
    ...names,
    cell({ class: "number" }, transfers),
    cell({ class: "number" }, sent),
    cell({ class: "number" }, saved),
    cell({ class: "wide" }, ...drawn),
  );
  return {
    node,
    show(flow) {
      figure(transfers, flow.transfers, format.count(flow.transfers));
      figure(sent, flow.sent, format.bytes(flow.sent), format.exactBytes(flow.sent));
      figure(saved, flow.saved, format.bytes(flow.saved), format.exactBytes(flow.saved));
      width(sentBar, flow.sent / flow.longest);
      width(savedBar, flow.saved / flow.longest);
    },
  };
}

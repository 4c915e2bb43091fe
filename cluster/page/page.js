// The status page's life: ask the server every few seconds and show what it says; say so if it does not answer, or if it
// wants a key. Nothing is asked for while nobody looks.

import { startChat, useModel } from "./chat.js";
import { attribute, byId, hide, say } from "./elements.js";
import { showFlows } from "./flows.js";
import * as format from "./format.js";
import { showLatency, showReplicaFigures } from "./overview.js";
import { chosenReplica, onReplicaChosen, showReplicas } from "./replicas.js";
import { onRequestsChanged, rememberRequests, showRequests } from "./requests.js";
import { get, key, Refused, Unauthorized } from "./server.js";

const INTERVAL_MS = 2000;
const WORDS = { loading: "connecting", live: "live", stale: "out of date", locked: "needs a key", paused: "paused" };
const THEME = "crosskv-theme";

const page = { state: "loading", replicas: [], answeredAt: null, timer: null, asking: false };

function show(state) {
  page.state = state;
  const shown = state === "live" && paused() ? "paused" : state;
  attribute(byId("state"), "data-state", shown);
  say(byId("state"), WORDS[shown]);
  hide(byId("key-form"), state !== "locked");
  hide(byId("main"), page.answeredAt === null || state === "locked");
  hide(byId("forget-key"), key.get() === null || state === "locked");
  document.body.classList.toggle("stale", state === "stale");
  const time = page.answeredAt && format.clock(page.answeredAt);
  say(byId("updated"), !time || state === "locked" ? "" : state === "stale" ? `figures of ${time}` : time);
}

const paused = () => byId("pause").getAttribute("aria-pressed") === "true";

// One after the other, so that one connection does, and with it one front end where several share the port.
async function refresh() {
  const cluster = await get("cluster");
  const latency = await get("latency");
  const requests = await get("requests?limit=50");
  const now = new Date();
  page.answeredAt = now;
  page.replicas = cluster;
  showReplicaFigures(cluster, now / 1000);
  showLatency(latency);
  rememberRequests(requests);
  showReplicas(cluster, now / 1000);
  showWhatIsChosen();
}

function showWhatIsChosen() {
  showFlows(page.replicas, chosenReplica());
  showRequests(chosenReplica());
}

async function nameModel() {
  const { data: [model] } = await get("v1/models");
  useModel(model.id, model.max_model_len);
  say(byId("model"), model.id);
  document.title = `${model.id} · crosskv`;
}

async function look() {
  clearTimeout(page.timer);
  if (page.asking || page.state === "locked") return;
  page.asking = true;
  try {
    if (byId("model").textContent === "") await nameModel();
    await refresh();
    say(byId("notice"), "");
    show("live");
  } catch (error) {
    fail(error);
  } finally {
    page.asking = false;
    if (!document.hidden && !paused()) page.timer = setTimeout(look, INTERVAL_MS);
  }
}

function fail(error) {
  if (error instanceof Unauthorized) {
    lock();
    return;
  }
  show("stale");
  const since = page.answeredAt ? ` What is shown is of ${format.clock(page.answeredAt)}.` : "";
  const what = error instanceof Refused ? `The server answers, but without figures: ${error.message}.` : `No figures: ${error.message}.`;
  say(byId("notice"), `${what}${since}`);
}

function lock() {
  say(byId("key-refusal"), key.get() === null ? "" : "The server does not know this key.");
  key.forget();
  say(byId("notice"), "");
  show("locked");
  byId("key").focus();
}

function startKeys() {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = byId("key").value.trim();
    byId("key").value = "";
    // Nothing else can be sent in a header.
    if (!/^[!-~]+$/.test(given)) {
      say(byId("key-refusal"), "A key has letters, digits and signs of ASCII only.");
      return;
    }
    key.set(given);
    page.state = "loading";
    look();
  });
  byId("forget-key").addEventListener("click", () => {
    key.forget();
    location.reload();
  });
}

function startTheme() {
  const choice = byId("theme");
  choice.value = localStorage.getItem(THEME) ?? "auto";
  const apply = () => attribute(document.documentElement, "data-theme", choice.value);
  choice.addEventListener("change", () => {
    localStorage.setItem(THEME, choice.value);
    apply();
  });
  apply();
}

function startPausing() {
  byId("pause").addEventListener("click", () => {
    attribute(byId("pause"), "aria-pressed", !paused());
    say(byId("pause"), paused() ? "Resume" : "Pause");
    show(page.state);
    if (paused()) clearTimeout(page.timer);
    else look();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(page.timer);
    else if (!paused()) look();
  });
}

startTheme();
startKeys();
startPausing();
startChat(lock);
onReplicaChosen(() => {
  showReplicas(page.replicas, page.answeredAt / 1000);
  showWhatIsChosen();
});
onRequestsChanged(showWhatIsChosen);
look();

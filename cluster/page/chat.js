// A conversation with the model: streamed, stopped on demand, forgotten with the page.

import { attribute, byId, element, say } from "./elements.js";
import * as format from "./format.js";
import { events, Refused, Unauthorized } from "./server.js";

const NEAR_END = 24;

const conversation = []; // {role, content}, as the API has it
let model = null;
let template = true; // until the server says that the model has none
let answering = null; // the AbortController of the answer that is being streamed
let onUnauthorized = () => {};

export function startChat(unauthorized) {
  onUnauthorized = unauthorized;
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (answering) answering.abort();
    else send();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!answering) send();
  });
  byId("chat-clear").addEventListener("click", () => {
    answering?.abort();
    conversation.length = 0;
    byId("conversation").replaceChildren();
    byId("question").focus();
  });
}

export function useModel(name, maxTokens) {
  model = name;
  byId("max-tokens").value = Math.min(256, Math.floor(maxTokens / 2));
}

async function send() {
  const question = byId("question").value;
  if (question.trim() === "" || model === null) return;
  byId("question").value = "";
  message("user", "You").append(question);
  const answer = message("assistant", model);
  const controller = new AbortController();
  conversation.push({ role: "user", content: question });
  busy(controller);
  const began = performance.now();
  const got = { text: "", first: null, usage: null, finish: null };
  try {
    for await (const event of ask(question, controller.signal)) {
      got.usage = event.usage ?? got.usage;
      const choice = event.choices[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      got.finish = choice?.finish_reason ?? got.finish;
      if (piece === "") continue;
      got.first ??= performance.now() - began;
      got.text += piece;
      add(answer, piece);
    }
    remark(answer, account(got), "");
    say(byId("chat-said"), `The answer is complete: ${got.text}`);
  } catch (error) {
    const stopped = error.name === "AbortError";
    const expected = error instanceof Refused || error instanceof Unauthorized;
    const reason = stopped ? "stopped" : expected ? error.message : "the connection was lost";
    remark(answer, stopped ? "Stopped." : `No answer: ${reason}`, stopped ? "" : "bad");
    say(byId("chat-said"), stopped ? "The answer was stopped." : `No answer: ${reason}`);
    if (error instanceof Unauthorized) onUnauthorized();
  } finally {
    // A turn that failed at once is no part of the conversation; one that broke off is, as far as it came.
    if (got.text === "") conversation.pop();
    else conversation.push({ role: "assistant", content: got.text });
    busy(null);
  }
}

// Asks for a chat, or for a text's continuation if the model has no chat template.
async function* ask(question, signal) {
  const common = {
    model,
    max_tokens: byId("max-tokens").valueAsNumber || 256,
    temperature: Number.isNaN(byId("temperature").valueAsNumber) ? 0.7 : byId("temperature").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (template) {
    try {
      yield* events("v1/chat/completions", { ...common, messages: conversation }, signal);
      return;
    } catch (error) {
      if (!(error instanceof Refused) || error.code !== "no_chat_template") throw error;
      template = false;
      say(byId("chat-kind"), "This model has no chat template: each text is continued by itself.");
    }
  }
  yield* events("v1/completions", { ...common, prompt: question }, signal);
}

function account({ first, usage, finish }) {
  const parts = [];
  if (usage) {
    const { payload_bytes: sent, prefill_replica: from } = usage.crosskv;
    parts.push(`${format.count(usage.completion_tokens)} tokens for a prompt of ${format.count(usage.prompt_tokens)}`);
    parts.push(sent > 0 ? `${format.bytes(sent)} of KV from ${from}` : "no KV sent");
  }
  if (first !== null) parts.push(`first after ${format.duration(first / 1000)}`);
  if (finish === "length") parts.push("cut off at its limit of tokens");
  return parts.join(" · ");
}

function message(kind, author) {
  const text = element("p", { class: "text" });
  const node = element("div", { class: `message ${kind}` }, element("p", { class: "author quiet small" }, author), text);
  keepEnd(() => byId("conversation").append(node));
  return text;
}

const add = (text, piece) => keepEnd(() => text.append(piece));

function remark(text, words, kind) {
  keepEnd(() => text.parentElement.append(element("p", { class: `small ${kind || "quiet"}` }, words)));
}

// Follows the text down, unless the reader has gone up.
function keepEnd(change) {
  const box = byId("conversation");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function busy(controller) {
  answering = controller;
  say(byId("send"), controller ? "Stop" : "Send");
  attribute(byId("conversation"), "aria-busy", controller !== null);
}

// The server that this page came from, asked with the key that this tab was given.

const KEY = "crosskv-api-key";
const PATIENCE_MS = 10_000;

// The server wants a key: none was given, or not one that it knows.
export class Unauthorized extends Error {}

// Nobody answers, or not as this server would.
export class Unreachable extends Error {}

// The server answers, and says why it cannot do it.
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export async function get(path) {
  const response = await request(path, { signal: AbortSignal.timeout(PATIENCE_MS) });
  try {
    return await response.json();
  } catch {
    throw new Unreachable(`the answer to ${path} is not JSON`);
  }
}

// The events of a streamed answer, parsed. Ends at [DONE]; a failure in the middle is raised.
export async function* events(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data: ")) continue;
    const data = line.slice("data: ".length);
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refused(200, event.error.message, event.error.code);
    yield event;
  }
  throw new Unreachable("the answer broke off");
}

async function request(path, options) {
  const headers = { ...options.headers };
  if (key.get() !== null) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (options.signal?.aborted && error.name === "AbortError") throw error;
    throw new Unreachable(error.name === "TimeoutError" ? `no answer within ${PATIENCE_MS / 1000} s` : "nobody answers");
  }
  if (response.ok) return response;
  const { message, code } = await refusal(response);
  if (response.status === 401) throw new Unauthorized(message);
  throw new Refused(response.status, message, code);
}

async function refusal(response) {
  try {
    const { error } = await response.json();
    return { message: String(error.message), code: error.code };
  } catch {
    return { message: `status ${response.status}`, code: null };
  }
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    // Whoever asked may have heard enough, or the stream has failed.
    reader.cancel().catch(() => {});
  }
}

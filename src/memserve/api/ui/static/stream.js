// The events of /ui/events. EventSource cannot send a key, so the stream is read with fetch.

// Of several models the page shows the one in its address; without one, the first.
export function ofModel(path) {
  const url = new URL(path, import.meta.url);
  const model = new URLSearchParams(location.search).get("model");
  if (model) url.searchParams.set("model", model);
  return url;
}

// Servers of other projects have one snapshot for all their models, which names the first.
export function shownModel({ model, models = [] }) {
  const chosen = new URLSearchParams(location.search).get("model");
  return models.includes(chosen) ? chosen : model;
}

const EVENTS = ofModel("events");
const SILENCE_MS = 30000;
const PAUSES_MS = [500, 1000, 2000, 4000];

export function keyHeaders() {
  const key = sessionStorage.getItem("memserve-key");
  return key ? { authorization: `Bearer ${key}` } : {};
}

// Calls onEvent(snapshot) for each event, onState(text, isBad, needsKey) for each change. Comes back after a restart.
export async function follow(onEvent, onState) {
  let failures = 0;
  for (;;) {
    const stop = new AbortController();
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(), SILENCE_MS);
    };
    const changed = () => stop.abort();
    addEventListener("memserve-key", changed);
    try {
      heard();
      const response = await fetch(EVENTS, { headers: keyHeaders(), signal: stop.signal, cache: "no-store" });
      if (response.status === 401) {
        onState("needs a key", true, true);
        await new Promise((resolve) => addEventListener("memserve-key", resolve, { once: true }));
        continue;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      onState("live", false, false);
      failures = 0;
      await read(response.body.getReader(), onEvent, heard);
      throw new Error("the stream has ended");
    } catch (error) {
      onState("reconnecting", true, false);
      await new Promise((resolve) => setTimeout(resolve, PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)]));
      failures += 1;
    } finally {
      clearTimeout(timer);
      removeEventListener("memserve-key", changed);
    }
  }
}

// The `data:` lines of an event stream, parsed, one after another.
export async function read(reader, onEvent, heard = () => {}) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard();
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") onEvent(JSON.parse(line.slice(6)));
    }
  }
}

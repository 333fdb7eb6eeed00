// Reads the samples of /metrics in a snapshot, and what has changed since earlier ones.

export const HISTORY = 240; // snapshots of which the page keeps a few numbers
const FINE = 60; // of these, live ones that are kept as they come
const APART_MS = 4500; // older ones are kept every fifth second, as the server does
const KEPT_MS = 600000;

export class Figures {
  constructor() {
    this.now = null;
    this.history = [];
  }

  take(snapshot) {
    this.now = snapshot;
    const point = { time_ms: snapshot.time_ms, totals: {}, tiers: this.tiers(), live: this.sum(this.live()) };
    for (const [name, rows] of Object.entries(snapshot.metrics)) {
      if (name.endsWith("_total")) point.totals[name] = rows.reduce((sum, [, value]) => sum + value, 0);
    }
    for (const [labels, value] of this.rows("memserve_instance_received_bytes_total")) {
      point.totals[`received ${labels.instance}`] = value;
    }
    const last = this.history[this.history.length - 1];
    const counter = "memserve_http_requests_total";
    if (last && (point.totals[counter] ?? 0) < (last.totals[counter] ?? 0)) this.history = []; // the server is new
    this.history.push(point);
    if (this.history.length > HISTORY) this.history.shift();
  }

  // What the server kept before this page: snapshots with the figures of charts alone.
  begin(moments) {
    this.history = [];
    for (const moment of moments) this.take(moment);
  }

  // Of a live page: the last minute as it came, and what is older up to ten minutes in steps of five seconds.
  thin() {
    const at = this.history.length - FINE;
    const apart = at > 1 ? this.history[at].time_ms - this.history[at - 1].time_ms : APART_MS;
    if (apart < APART_MS) this.history.splice(at, 1);
    const first = this.now.time_ms - KEPT_MS;
    while (this.history[0].time_ms < first) this.history.shift();
  }

  rows(name, labels = {}) {
    const wanted = Object.entries(labels);
    return (this.now.metrics[name] ?? []).filter(([has]) => wanted.every(([key, value]) => has[key] === value));
  }

  has(name, labels) {
    return this.rows(name, labels).length > 0;
  }

  sum(name, labels) {
    return this.rows(name, labels).reduce((sum, [, value]) => sum + value, 0);
  }

  // Whether this is a router before servers of other projects.
  isFleet() {
    return this.has("memserve_fleet_engine_up");
  }

  // The totals of prompt tokens, and of those from KV.
  promptNames() {
    if (this.isFleet()) return ["memserve_fleet_prompt_tokens_total", "memserve_fleet_matched_tokens_total"];
    return ["memserve_prompt_tokens_total", "memserve_cached_prompt_tokens_total"];
  }

  // The gauge of requests that are not answered yet.
  live() {
    const names = ["memserve_router_requests_live", "memserve_fleet_requests_open", "memserve_sequences_running"];
    return names.find((name) => this.has(name)) ?? "memserve_http_requests_in_progress";
  }

  // What a total grew by a second, [milliseconds, rate] of each moment, over about `window` snapshots.
  rates(name, window = 3) {
    return this.history.slice(1).map((point, at) => {
      const first = this.history[Math.max(0, at + 1 - window)];
      const grown = (point.totals[name] ?? 0) - (first.totals[name] ?? 0);
      return [point.time_ms, Math.max(0, (1000 * grown) / Math.max(1, point.time_ms - first.time_ms))];
    });
  }

  // The share of one total's growth in another's, [milliseconds, share] of each moment at which there was any.
  shares(part, whole, window = 10) {
    return this.history.slice(1).flatMap((point, at) => {
      const first = this.history[Math.max(0, at + 1 - window)];
      const all = (point.totals[whole] ?? 0) - (first.totals[whole] ?? 0);
      const some = (point.totals[part] ?? 0) - (first.totals[part] ?? 0);
      return all > 0 ? [[point.time_ms, Math.min(1, Math.max(0, some / all))]] : [];
    });
  }

  // By how much a total has grown over the last `seconds`, and over how many seconds that is.
  grown(name, seconds) {
    const last = this.history[this.history.length - 1];
    const first = this.history.find((point) => last.time_ms - point.time_ms <= seconds * 1000);
    const grown = (last.totals[name] ?? 0) - (first.totals[name] ?? 0);
    return { grown: Math.max(0, grown), seconds: (last.time_ms - first.time_ms) / 1000 };
  }

  rate(name, seconds = 5) {
    const change = this.grown(name, seconds);
    return change.seconds > 0 ? change.grown / change.seconds : 0;
  }

  // How many observations of a histogram lie in each bucket: [upper bound in seconds, count].
  buckets(name) {
    const rows = this.rows(`${name}_bucket`).map(([labels, value]) => [labels.le, value]);
    return rows.map(([le, value], at) => [le === "+Inf" ? Infinity : Number(le), value - (at ? rows[at - 1][1] : 0)]);
  }

  // Seconds below which the share `q` of a histogram's observations lies, interpolated inside of its bucket.
  quantile(name, q) {
    const bound = (text) => (text === "+Inf" ? Infinity : Number(text));
    const buckets = this.rows(`${name}_bucket`).map(([labels, value]) => [bound(labels.le), value]);
    const total = buckets.length ? buckets[buckets.length - 1][1] : 0;
    if (!total) return null;
    let below = 0;
    let from = 0;
    for (const [until, value] of buckets) {
      if (value >= q * total) {
        if (until === Infinity) return from;
        return from + ((until - from) * (q * total - below)) / (value - below || 1);
      }
      [below, from] = [value, until];
    }
    return from;
  }

  blocksName() {
    return this.has("memserve_instance_blocks") ? "memserve_instance_blocks" : "memserve_pool_blocks";
  }

  // Blocks by tier: {hbm: {held, cached, free}}, of all instances or of one.
  tiers(instance = null) {
    const found = {};
    const name = this.blocksName();
    const clustered = name === "memserve_instance_blocks";
    for (const [labels, value] of this.rows(name, instance === null || !clustered ? {} : { instance })) {
      const tier = (found[labels.tier] ??= { held: 0, cached: 0, free: 0 });
      tier[labels.state === "used" ? "held" : labels.state] += value;
    }
    return found;
  }
}

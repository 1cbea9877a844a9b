// The stored history for a time: spans, commands and events, asked for when the time is looked at.
import { ask } from "/static/dom.js";
import { learnName } from "/static/names.js";

const SPAN_LIMIT = 20000;
const OVERLAP_MS = 3000; // what was asked for last is asked for again, since a span may have ended since

const timeOf = (from, to) => `start=${Math.max(0, Math.floor(from))}${to === Infinity ? "" : `&end=${Math.ceil(to)}`}`;

export class History {
  constructor(onLoad, query = "") {
    this.spans = new Map();
    this.commands = new Map();
    this.events = new Map();
    this.isTruncated = false;
    this.problem = "";
    this.onLoad = onLoad;
    this.query = query;
    this.known = null; // the time that is loaded, as [start, end], until the server's present at most
    this.isAsking = false;
    this.wanted = null;
  }

  // Loads what lacks of a time. The end Infinity is the server's present: the clock of this browser may be wrong. Calls while a request is under way are put together.
  async want(start, end) {
    this.wanted = [start, end];
    if (this.isAsking) return;
    this.isAsking = true;
    try {
      while (this.wanted) {
        const [from, to] = this.wanted;
        this.wanted = null;
        await this.load(from, to);
      }
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    }
    this.isAsking = false;
    this.onLoad();
  }

  async load(start, end) {
    let from = start;
    let to = end;
    if (this.known && start >= this.known[0] && end >= this.known[0] && start <= this.known[1]) {
      if (end <= this.known[1]) return;
      from = Math.max(start, this.known[1] - OVERLAP_MS);
    } else if (this.known && end >= this.known[0] && end <= this.known[1]) {
      to = this.known[0];
    } else {
      this.known = null;
    }
    const [leases, marks] = await Promise.all([this.spansOf(from, to), this.query ? { commands: [], events: [] } : ask(`/api/marks?${timeOf(from, to)}`)]);
    if (!this.known && this.spans.size > SPAN_LIMIT) this.spans.clear();
    const ended = this.take(leases, to);
    if (ended.length) {
      const again = await this.spansOf(Math.min(...ended.map((one) => one.begin_time)) - 1, to);
      for (const deleted of this.take(again, to)) this.spans.delete(deleted.span_id);
    }
    for (const one of marks.commands) this.commands.set(one.command_id, one);
    for (const one of marks.events) this.events.set(one.event_id, one);
    this.isTruncated = leases.is_truncated || Boolean(marks.is_truncated);
    const present = Math.min(to, leases.time);
    this.known = this.known ? [Math.min(this.known[0], from), Math.max(this.known[1], present)] : [from, present];
    this.onLoad();
  }

  spansOf(from, to) {
    return ask(`/api/history?${timeOf(from, to)}${this.query}`);
  }

  // Keeps the spans of an answer. Returns the open spans that a complete answer lacks: they ended before the asked time.
  take(leases, to) {
    const ids = new Set(leases.spans.map((one) => one.span_id));
    for (const one of leases.spans) {
      this.spans.set(one.span_id, one);
      learnName(one.workload_id, one.workload_name);
    }
    return leases.is_truncated ? [] : [...this.spans.values()].filter((one) => !one.end_time && one.begin_time < to && !ids.has(one.span_id));
  }

  // Forgets how far it is loaded, such as after an outage.
  forget() {
    this.known = null;
  }
}

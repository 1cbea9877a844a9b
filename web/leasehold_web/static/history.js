// The stored history for a time: spans, commands and events, asked for when the time is looked at.
import { ask } from "/static/dom.js";
import { live } from "/static/live.js";
import { learnName } from "/static/names.js";
import { isParked } from "/static/spans.js";
import { CONCLUDED } from "/static/words.js";

const SPAN_LIMIT = 20000;
const STAYS_AT_ONCE = 50; // workloads of one question for stays
const STAYS_ID = /^[\w.@/-]{1,64}$/; // a worker may report other ids, which the server does not look for
const STAYS_LIMIT = 400; // workloads whose earlier stay is asked for at once
const RETRY_MS = 2000; // after an answer that failed
const OVERLAP_MS = 3000; // what was asked for last is asked for again, since a span may have ended since

const timeOf = (from, to) => `start=${Math.max(0, Math.floor(from))}${to === Infinity ? "" : `&end=${Math.ceil(to)}`}`;

// The time from which the answers are complete. Spans come in the order of their ends, the latest first.
const cutOf = (leases, marks) => Math.max(leases.is_truncated ? Math.min(...leases.spans.map((one) => one.end_time ?? Infinity)) : 0, marks.complete_from ?? 0);

export class History {
  constructor(onLoad, query = "") {
    this.spans = new Map();
    this.commands = new Map();
    this.events = new Map();
    this.searched = new Map(); // the time before which a workload's last stay was asked for, by id
    this.cutAt = 0; // the time before which an answer was truncated, or 0
    this.lacksStays = false; // whether too many workloads have an earlier stay
    this.problem = "";
    this.onLoad = onLoad;
    this.query = query;
    this.known = null; // the time that is loaded, as [start, end], until the server's present at most
    this.isAsking = false;
    this.wanted = null; // the time that is loaded next
    this.newsUntil = null; // until when news is loaded next
    this.retry = 0; // the timer after an answer that failed
    this.isOver = false;
  }

  // Loads what lacks of a time. The end Infinity is the server's present: the clock of this browser may be wrong. Calls
  // while a request is under way are put together.
  want(start, end) {
    this.wanted = [start, end];
    return this.loadWanted();
  }

  // Loads what is new since the last answer until the end of a time, or all of it if none is loaded. A part that did not
  // fit is not asked for again.
  wantNews(start, end) {
    if (this.known) this.newsUntil = end;
    else this.wanted ??= [start, end];
    return this.loadWanted();
  }

  async loadWanted() {
    if (this.isAsking) return;
    clearTimeout(this.retry);
    this.isAsking = true;
    let wanted = null;
    let until = null;
    try {
      while (this.wanted || this.newsUntil !== null) {
        wanted = this.wanted;
        until = this.newsUntil;
        if (wanted) this.wanted = null;
        else this.newsUntil = null;
        if (wanted) await this.load(...wanted);
        else if (this.known) await this.load(this.known[0], until);
      }
      this.problem = "";
    } catch (error) {
      this.problem = `${error.message}${error.isTransient ? ". The page tries again by itself." : ""}`;
      if (wanted) this.wanted ??= wanted; // for the next call
      else this.newsUntil ??= until;
      if (error.isTransient && !this.isOver) this.retry = setTimeout(() => this.loadWanted(), RETRY_MS);
    }
    this.isAsking = false;
    this.onLoad();
  }

  // Ends the repetition of questions.
  end() {
    this.isOver = true;
    clearTimeout(this.retry);
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
    const isPart = this.known !== null;
    const [leases, marks] = await Promise.all([this.spansOf(from, to), this.query ? { commands: [], events: [] } : ask(`/api/marks?${timeOf(from, to)}`)]);
    if (!this.known && this.spans.size > SPAN_LIMIT) {
      this.spans.clear();
      this.searched.clear();
    }
    const ended = this.take(leases, to);
    if (ended.length) {
      const again = await this.spansOf(Math.min(...ended.map((one) => one.begin_time)) - 1, to);
      for (const deleted of this.take(again, to)) this.spans.delete(deleted.span_id);
    }
    for (const one of marks.commands) this.commands.set(one.command_id, one);
    for (const one of marks.events) this.events.set(one.event_id, one);
    if (isPart && !this.known) return; // forgotten meanwhile: the part does not count as loaded
    const present = Math.min(to, leases.time);
    const begin = Math.min(present, Math.max(from, cutOf(leases, marks)));
    const hasHole = this.known !== null && begin > this.known[1];
    this.known = this.known && !hasHole ? [Math.min(this.known[0], begin), Math.max(this.known[1], present)] : [begin, present];
    if (begin > from && (from === start || hasHole)) this.cutAt = begin;
    else if (from < this.cutAt) this.cutAt = 0;
    this.onLoad();
    if (!this.query) await this.loadStays(this.known[0]);
  }

  // Loads where workloads were before a time, since a parked time that began earlier leads from there. It leads to their
  // next stay, which may lie after all loaded ones.
  async loadStays(time) {
    const wanted = this.withoutStay(time);
    this.lacksStays = wanted.length > STAYS_LIMIT;
    for (let at = 0; at < Math.min(wanted.length, STAYS_LIMIT); at += STAYS_AT_ONCE) {
      const ids = wanted.slice(at, Math.min(at + STAYS_AT_ONCE, STAYS_LIMIT));
      const found = await ask(`/api/stays?end=${Math.ceil(time)}&${new URLSearchParams(ids.map((id) => ["workload", id]))}`);
      for (const id of ids) this.searched.set(id, time);
      this.keep(found.spans);
    }
  }

  // The workloads that may have a stay before a time, none of which is known: the parked ones, and those that have GPUs
  // now. The latter were parked if they have no stay in the loaded time.
  withoutStay(time) {
    const candidates = [...live.workloads.values()].filter((one) => isParked(one) || one.status?.lease);
    const begins = new Map(candidates.map((one) => [one.workload_id, Infinity]));
    for (const one of this.spans.values()) if (one.workload_id && one.state === "LEASED") begins.set(one.workload_id, Math.min(begins.get(one.workload_id) ?? Infinity, one.begin_time));
    const isNew = (id) => (live.workloads.get(id)?.create_time ?? 0) >= time;
    return [...begins].filter(([id, begin]) => begin >= time && STAYS_ID.test(id) && !(this.searched.get(id) <= time) && !isNew(id)).map(([id]) => id);
  }

  spansOf(from, to) {
    return ask(`/api/history?${timeOf(from, to)}${this.query}`);
  }

  keep(spans) {
    for (const one of spans) {
      this.spans.set(one.span_id, one);
      learnName(one.workload_id, one.workload_name);
    }
  }

  // Keeps the spans of an answer. Returns the open spans that a complete answer lacks: they ended before the asked time.
  take(leases, to) {
    this.keep(leases.spans);
    const ids = new Set(leases.spans.map((one) => one.span_id));
    return leases.is_truncated ? [] : [...this.spans.values()].filter((one) => !one.end_time && one.begin_time < to && !ids.has(one.span_id));
  }

  // Whether more happened since a time than answers have.
  isCut(start) {
    return start < this.cutAt || this.lacksStays;
  }

  // Forgets how far it is loaded, such as after an outage. A command may have ended meanwhile.
  forget() {
    this.known = null;
    for (const [id, one] of this.commands) if (!CONCLUDED.has(one.state)) this.commands.delete(id);
  }
}

// The stored history for a time: spans, commands and events, asked for when the time is looked at.
import { ask } from "/static/dom.js";
import { live } from "/static/live.js";
import { learnName } from "/static/names.js";
import { isParked } from "/static/spans.js";
import { CONCLUDED, ENDED } from "/static/words.js";

const STAYS_AT_ONCE = 50; // workloads of one question for stays
const STAYS_ID = /^[\w.@/-]{1,64}$/; // a worker may report other ids, which the server does not look for
const STAYS_LIMIT = 400; // workloads whose earlier or next stay is asked for at once
const SKEW_MS = 60000; // how much the clock of a host may be fast
const RETRY_MS = 2000; // after an answer that failed
const OVERLAP_MS = 3000; // what was asked for last is asked for again, since a span may have ended since

// Whether a workload ended about when its last known stay did, by the clock of its host.
const hasEndedWith = ({ state, end_time: end = 0 }, stayEnd) => ENDED.has(state) && end < stayEnd + SKEW_MS;

const timeOf = (from, to) => `start=${Math.max(0, Math.floor(from))}${to === Infinity ? "" : `&end=${Math.ceil(to)}`}`;

// The time from which the answers are complete. Spans come in the order of their ends, the latest first.
const cutOf = (leases, marks) => Math.max(leases.is_truncated ? Math.min(...leases.spans.map((one) => one.end_time ?? Infinity)) : 0, marks.complete_from ?? 0);

export class History {
  constructor(onLoad, query = "") {
    this.spans = new Map();
    this.commands = new Map();
    this.events = new Map();
    this.searched = new Map(); // the time before which a workload's last stay was asked for, by id
    this.followed = new Map(); // the state of a workload and the end of its stay for which the next stay was asked for
    this.isPresent = false; // whether the loaded time ended with the server's present
    this.cutAt = 0; // the time before which an answer was truncated, or 0
    this.lacksStays = false; // whether too many workloads have such a stay
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
      if (end <= this.known[1]) return this.loadStays(); // a workload may have been restored since
      from = Math.max(start, this.known[1] - OVERLAP_MS);
    } else if (this.known && end >= this.known[0] && end <= this.known[1]) {
      to = this.known[0];
    } else {
      this.known = null;
    }
    const isPart = this.known !== null;
    const [leases, marks] = await Promise.all([this.spansOf(from, to), this.query ? { commands: [], events: [] } : ask(`/api/marks?${timeOf(from, to)}`)]);
    if (!isPart) {
      // Between these spans and the new ones there may be unknown ones.
      this.spans.clear();
      this.searched.clear();
      this.followed.clear();
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
    this.isPresent = to >= leases.time;
    const begin = Math.min(present, Math.max(from, cutOf(leases, marks)));
    const hasHole = this.known !== null && begin > this.known[1];
    this.known = this.known && !hasHole ? [Math.min(this.known[0], begin), Math.max(this.known[1], present)] : [begin, present];
    if (begin > from && (from === start || hasHole)) this.cutAt = begin;
    else if (from < this.cutAt) this.cutAt = 0;
    this.onLoad();
    await this.loadStays();
  }

  // Loads where workloads were before and after the loaded time, if they were parked at its begin or its end.
  async loadStays() {
    if (this.query || !this.known) return;
    const [begin, end] = this.known;
    const { before, after } = this.lackingStays(begin, end);
    this.lacksStays = Math.max(before.length, after.length) > STAYS_LIMIT;
    await this.askStays(begin, before, ({ id }) => this.searched.set(id, begin));
    await this.askStays(end, after, ({ id, key }) => this.followed.set(id, key));
  }

  async askStays(time, wanted, note) {
    for (let at = 0; at < Math.min(wanted.length, STAYS_LIMIT); at += STAYS_AT_ONCE) {
      const some = wanted.slice(at, Math.min(at + STAYS_AT_ONCE, STAYS_LIMIT));
      const found = await ask(`/api/stays?end=${Math.ceil(time)}&${new URLSearchParams(some.map(({ id }) => ["workload", id]))}`);
      some.forEach(note);
      this.keep(found.spans);
    }
  }

  // The workloads whose stay before or after a time is unknown. Parked ones, and those that have GPUs now, may have been
  // parked at its begin. A workload whose last known stay has ended may have been parked at its end.
  lackingStays(begin, end) {
    const first = new Map(); // when the first known stay began
    const last = new Map(); // when the last one that began before the end has ended
    const hasNext = new Set();
    for (const { state, workload_id: id, begin_time: from, end_time: to = Infinity } of this.spans.values()) {
      if (!id || state !== "LEASED") continue;
      first.set(id, Math.min(first.get(id) ?? Infinity, from));
      if (from >= end) hasNext.add(id);
      else last.set(id, Math.max(last.get(id) ?? 0, to));
    }
    const all = [...live.workloads.values()].filter((one) => STAYS_ID.test(one.workload_id));
    const candidates = new Set([...all.filter((one) => isParked(one) || one.status?.lease).map((one) => one.workload_id), ...first.keys()]);
    const isNew = (id) => (live.workloads.get(id)?.create_time ?? 0) >= begin;
    const before = [...candidates].filter((id) => (first.get(id) ?? Infinity) >= begin && STAYS_ID.test(id) && !(this.searched.get(id) <= begin) && !isNew(id)).map((id) => ({ id }));
    if (this.isPresent) return { before, after: [] }; // nothing is later
    const after = all.map(({ workload_id: id, status = {} }) => ({ id, key: `${last.get(id)} ${status.state} ${status.lease?.lease_id}`, status })).filter(({ id, key, status }) => last.get(id) < end && !hasNext.has(id) && this.followed.get(id) !== key && !hasEndedWith(status, last.get(id)));
    return { before, after };
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

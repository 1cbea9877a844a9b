// The stored history for a time: spans, commands and events, asked for when the time is looked at.
import { ask } from "/static/dom.js";
import { learnName } from "/static/names.js";
import { CONCLUDED } from "/static/words.js";

const RETRY_MS = 2000; // after an answer that failed
const OVERLAP_MS = 3000; // what was asked for last is asked for again, since a span may have ended since

const timeOf = (from, to) => `start=${Math.max(0, Math.floor(from))}${to === Infinity ? "" : `&end=${Math.ceil(to)}`}`;

// Whether a list has all open spans of its time, which come first.
const hasOpen = (spans, isTruncated) => !isTruncated || spans.some((one) => one.end_time);

// The time from which a truncated list is complete. After the open spans come the others by their ends, the latest first.
const firstOf = (spans) => Math.min(...spans.map((one) => one.end_time ?? Infinity));

// The time from which the answers are complete. Parked times that go on and do not fit are told apart.
function cutOf(leases, marks = {}) {
  const cuts = [marks.complete_from ?? -Infinity];
  if (leases.is_truncated) cuts.push(firstOf(leases.spans));
  if (leases.is_parked_truncated && hasOpen(leases.parked, true)) cuts.push(firstOf(leases.parked));
  return Math.max(...cuts);
}

export class History {
  constructor(onLoad, query = "") {
    this.spans = new Map();
    this.commands = new Map();
    this.events = new Map();
    this.cutAt = 0; // the time before which an answer was truncated, or 0
    this.lostAt = 0; // the time before which ends of spans may be unknown, or 0
    this.lacksParked = false; // whether parked times that go on did not fit
    this.problem = "";
    this.onLoad = onLoad;
    this.query = query;
    this.known = null; // the time that is loaded, as [start, end], until the server's present at most
    this.freshAt = 0; // the server's time up to which the ends of the loaded spans are known
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
        else if (this.known) await (until > this.known[1] ? this.load(this.known[0], until) : this.loadEnds());
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
    if (!isPart) {
      this.spans.clear(); // between these and the new ones there may be unknown ones
      this.lostAt = 0;
      this.lacksParked = false;
    }
    const lacked = this.lacksParked;
    await this.takeAll(leases, to);
    for (const one of marks.commands) this.commands.set(one.command_id, one);
    for (const one of marks.events) this.events.set(one.event_id, one);
    if (isPart && !this.known) return; // forgotten meanwhile: the part does not count as loaded
    const present = Math.min(to, leases.time);
    if (!this.known || to >= this.known[1]) this.freshAt = leases.time;
    const begin = Math.min(present, Math.max(from, cutOf(leases, marks)));
    const hasHole = this.known !== null && begin > this.known[1];
    if (hasHole) for (const [id, one] of this.spans) if (one.end_time < begin) this.spans.delete(id); // no joint leads over it
    this.known = this.known && !hasHole ? [Math.min(this.known[0], begin), Math.max(this.known[1], present)] : [begin, present];
    if (begin > from && (from === start || hasHole)) this.cutAt = begin;
    else if (from < this.cutAt) this.cutAt = 0;
    if (lacked && hasOpen(leases.parked, leases.is_parked_truncated)) this.loadAnew(); // the missing ones may fit now
    this.onLoad();
  }

  // Loads the ends of spans that went on when they were loaded.
  async loadEnds() {
    const to = this.known[1];
    if (![...this.spans.values()].some((one) => !one.end_time && one.begin_time < to)) return;
    const leases = await this.spansOf(this.freshAt - OVERLAP_MS, to);
    await this.takeAll(leases, to);
    if (leases.is_truncated) this.loadAnew();
    this.freshAt = leases.time;
    this.onLoad();
  }

  // Lets the next call load all of the loaded time.
  loadAnew() {
    this.wanted ??= this.known;
    this.known = null;
  }

  // Keeps the spans of an answer. Those that it lacks although they went on have ended before the asked time, or were
  // deleted.
  async takeAll(leases, to) {
    const ended = this.take(leases, to);
    if (!ended.length) return;
    const again = await this.spansOf(Math.min(...ended.map((one) => one.begin_time)) - 1, to);
    for (const deleted of this.take(again, to)) this.spans.delete(deleted.span_id);
    this.lostAt = Math.max(this.lostAt, cutOf(again));
  }

  spansOf(from, to) {
    return ask(`/api/history?${timeOf(from, to)}${this.query}`);
  }

  keep(spans) {
    for (const one of spans) {
      this.spans.set(one.span_id, one);
      learnName(one.workload_id, one.workload_name);
      learnName(one.worker_id, one.worker_name);
    }
  }

  // Keeps the spans of an answer. Returns the open spans that it lacks although it has all open ones.
  take({ spans, is_truncated: isTruncated, parked, is_parked_truncated: isParkedTruncated }, to) {
    this.keep(spans);
    this.keep(parked);
    const ids = new Set([...spans, ...parked].map((one) => one.span_id));
    const hasAllOpen = { false: hasOpen(spans, isTruncated), true: hasOpen(parked, isParkedTruncated) };
    this.lacksParked ||= !hasAllOpen.true;
    return [...this.spans.values()].filter((one) => !one.end_time && one.begin_time < to && !ids.has(one.span_id) && hasAllOpen[Boolean(one.parked)]);
  }

  // Whether more happened since a time than answers have.
  isCut(start) {
    const cut = Math.max(this.cutAt, this.lostAt);
    return cut > 0 && start < cut; // a window may begin before 1970
  }

  // Forgets how far it is loaded, such as after an outage. A command may have ended meanwhile.
  forget() {
    this.known = null;
    for (const [id, one] of this.commands) if (!CONCLUDED.has(one.state)) this.commands.delete(id);
  }
}

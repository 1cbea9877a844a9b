// The time in sight of the timeline: its length, its end, and whether it follows now. Times in ms.
import { isTimeKnown, now } from "/static/server_time.js";

const MINUTE = 60000;
const LEAST = 10000;
const MOST = 8 * 1440 * MINUTE;
const AHEAD = 0.02; // the part of the picture that is ahead of now while it follows

export const RANGES = [["1 min", MINUTE], ["5 min", 5 * MINUTE], ["15 min", 15 * MINUTE], ["1 h", 60 * MINUTE], ["6 h", 360 * MINUTE], ["1 d", 1440 * MINUTE], ["1 w", 10080 * MINUTE]];

export class TimeWindow {
  // The time that the query of an address names: its length, and its end if it does not follow now.
  constructor(query) {
    const [range, end] = ["range", "end"].map((name) => Number(query.get(name)));
    this.range = range >= LEAST && range <= MOST ? range : 5 * MINUTE;
    this.follow();
    if (!(end > 0)) return;
    this.rest();
    this.end = end;
    this.settle();
  }

  // Follows now instead of a time in the future, once the server's time is known: the browser's clock may be slow.
  // Returns whether it does so.
  settle() {
    const isAhead = isTimeKnown() && this.end > now() + this.range * AHEAD;
    if (isAhead) this.follow();
    return isAhead;
  }

  // The query of an address that shows the same.
  get query() {
    const range = `range=${Math.round(this.range)}`;
    return this.isFollowing ? range : `${range}&end=${Math.round(this.end)}`;
  }

  get start() {
    return this.end - this.range;
  }

  // Goes to now, and on with it.
  follow() {
    this.isFollowing = true;
    this.end = now() + this.range * AHEAD;
  }

  rest() {
    this.isFollowing = false;
  }

  // Shows another length of time. The time "around" stays where it is in the picture.
  zoomTo(range, around = null) {
    const next = Math.min(MOST, Math.max(LEAST, range));
    const fixed = around ?? (this.isFollowing ? this.end : this.end - this.range / 2);
    this.end = fixed + ((this.end - fixed) / this.range) * next;
    this.range = next;
    const latest = now() + next * AHEAD;
    if (this.isFollowing || this.end > latest) this.end = latest;
  }

  // Moves in time. Once it comes back to now, it follows again.
  pan(milliseconds) {
    this.isFollowing = false;
    this.end += milliseconds;
    if (milliseconds > 0 && this.end >= now()) this.follow();
  }

  // How times lie in a picture with this width, right of the labels.
  scale(width) {
    const labels = width < 600 ? 44 : 64;
    const times = Math.max(1, width - labels);
    return {
      labels,
      xOf: (time) => labels + ((time - this.start) / this.range) * times,
      timeAt: (x) => this.start + ((x - labels) / times) * this.range,
      perPixel: this.range / times,
    };
  }
}

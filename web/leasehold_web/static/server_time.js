// The present by the clock of the server, which dates all entries. The clock of this browser may be wrong.
const TOLERATED_MS = 1000; // a smaller difference disturbs nobody

let skewMs = 0;
let isLearned = false;

// Whether an answer has told the server's time.
export function isTimeKnown() {
  return isLearned;
}

export function now() {
  return Date.now() + skewMs;
}

// Takes the server's time of an answer, and when this browser asked and got it. The way of the answer is no difference.
export function learnTime(time, askedAt, gotAt) {
  if (time === undefined) return;
  isLearned = true;
  const skew = time > gotAt ? time - gotAt : Math.min(0, time - askedAt);
  skewMs = Math.abs(skew) > TOLERATED_MS ? skew : 0;
}

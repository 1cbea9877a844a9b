// What the timeline shows, as text: for tips, for screen readers and for its table.
import { live, staleSince, targetOf, withNames, workloadName } from "/static/live.js";
import { now } from "/static/server_time.js";
import { lower, moment, operationOf, seconds, when } from "/static/words.js";

export function nameOf(span) {
  return span.workload_name || (span.workload_id ? workloadName(span.workload_id) : lower(span.state));
}

export function placeOfSpan(span) {
  return `${span.worker_name}/${span.slot ?? 0}`;
}

export function lengthOf(span) {
  return seconds(((span.end_time ?? now()) - span.begin_time) / 1000);
}

// The time until which the state of a host is known: that of its last report if the host is out of contact, and that of
// the shown state if the page is out of contact. Undefined: the present. 0: the host has not reported since the
// coordinator's start.
export function knownUntil(id) {
  const worker = live.workers.get(id);
  const isSilent = worker && worker.state !== "CONNECTED";
  const shownAt = staleSince();
  if (!isSilent) return shownAt;
  return Math.min(shownAt ?? Infinity, worker.last_seen_time ?? 0);
}

// The time until which an open span is known. Undefined: the present, or the span has ended.
export function lastReportOf(span) {
  return span.end_time ? undefined : knownUntil(span.worker_id);
}

// The end of a joint. One that goes on ends at a time, or earlier if it is not known until then.
export function endOfJoint({ from, begin, end }, until) {
  if (end !== Infinity) return end;
  return Math.max(begin, Math.min(until, knownUntil(from.worker_id) || (staleSince() ?? Infinity)));
}

// Whether a joint goes on whose host has not reported since the coordinator's start: nobody knows until when.
export function isUnreported({ from, end }) {
  return end === Infinity && knownUntil(from.worker_id) === 0;
}

// The end of a span in a table.
export function endOf(span) {
  if (span.end_time) return moment(span.end_time);
  return lastReportOf(span) === undefined ? "now" : "(last known)";
}

// Tells items apart, also after they are loaded again.
export function keyOf({ span, joint, command, event }) {
  return span?.span_id ?? command?.command_id ?? event?.event_id ?? `${joint.from.span_id} ${joint.kind}`;
}

// Title and text of a span, joint, command or event.
export function textOf({ span, joint, command, event }) {
  if (span) {
    const until = lastReportOf(span) === undefined ? `${span.end_time ? `to ${when(span.end_time)}` : "until now"}, ${lengthOf(span)}` : "(last known)";
    return [nameOf(span), `${lower(span.state)} ${placeOfSpan(span)} from ${when(span.begin_time)} ${until}${span.owner ? `. Owner: ${span.owner}` : ""}`];
  }
  if (joint) return textOfJoint(joint);
  if (command) {
    const length = command.end_time ? `, ${seconds((command.end_time - command.create_time) / 1000)}` : "";
    return [`${operationOf(command)} of ${targetOf(command)}`, `${lower(command.state)}, ${moment(command.create_time)}${length}${command.error ? `: ${withNames(command.error.message)}` : ""}`];
  }
  return [moment(event.time), withNames(event.message) || lower(event.kind)];
}

// A guessed pair is not told: the text has all GPUs of both stays.
function textOfJoint({ from, to, begin, end, kind, isGuess, before, after }) {
  const places = (one, stay) => (isGuess ? stay : [one]).map(placeOfSpan).join(", ");
  if (kind === "move") return [`${nameOf(from)} moved`, `from ${places(from, before)} to ${places(to, after)} at ${when(end)}`];
  if (end === Infinity) return [`${nameOf(from)} was parked`, `since ${when(begin)}${knownUntil(from.worker_id) === undefined ? "" : " (last known)"}`];
  return [`${nameOf(from)} was parked`, `from ${when(begin)} to ${when(end)}, ${seconds((end - begin) / 1000)}${to ? `; then restored on ${places(to, after)}` : ""}`];
}

// The past of GPUs and workloads: what was where, and the joints between. Pure, without a picture.
import { workloadsOf } from "/static/words.js";

// A move exchanges the lease at once, so one report has the end of the old spans and the begin of the new ones.
const TOGETHER_MS = 20;

// A stay begins during its command, except for the delays of reports.
const BEFORE_MS = 1000;
const AFTER_MS = 2000;

// Spans of one workload as groups with one lease, such as its stays or its parked times, in the order of time.
function groupsOf(spans) {
  const groups = new Map();
  for (const span of spans) {
    // Two moves within one lease would otherwise look like one stay.
    const key = `${span.lease_id ?? ""} ${Math.round(span.begin_time / 500)}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(span);
  }
  return [...groups.values()].map((group) => ({
    spans: group.sort((a, b) => (a.slot ?? 0) - (b.slot ?? 0)),
    begin: Math.min(...group.map((one) => one.begin_time)),
    end: Math.max(...group.map((one) => one.end_time ?? Infinity)),
  })).sort((a, b) => a.begin - b.begin);
}

function paired(before, after) {
  const count = before.length && after.length ? Math.max(before.length, after.length) : 0;
  return Array.from({ length: count }, (_, at) => [before[Math.min(at, before.length - 1)], after[Math.min(at, after.length - 1)]]);
}

const lacks = (spans) => (one) => !spans.some((other) => other.gpu_uuid === one.gpu_uuid);

// The pairs of a move. A GPU that the workload keeps is in none.
function moved(before, after) {
  return paired(before.filter(lacks(after)), after.filter(lacks(before)));
}

// The succeeded commands that give GPUs, by workload and kind of joint.
function givingOf(commands) {
  const found = new Map();
  for (const command of commands) {
    const kind = command.operation?.remap ? "move" : command.operation?.restore && "parked";
    if (!kind || command.state !== "SUCCEEDED") continue;
    for (const id of workloadsOf(command)) {
      const key = `${id} ${kind}`;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(command);
    }
  }
  return found;
}

// The pairs of UUIDs of a command. A restore without pairs gives GPUs back. Of others' commands, pairs and phases are
// hidden.
function uuidPairs({ applied_pairs: pairs = [], claimed_gpu_uuids: claimed = [], phases = [] } = {}) {
  if (pairs.length || !phases.length) return pairs.map((one) => [one.old_uuid, one.new_uuid]);
  return claimed.map((uuid) => [uuid, uuid]);
}

// The GPU pairs between two stays, by the command that was nearest in time. A swap has pairs of other workloads, too.
function applied(before, after, commands) {
  const begin = Math.min(...after.map((one) => one.begin_time));
  let nearest = null;
  let least = Infinity;
  for (const command of commands) {
    const { create_time: from, end_time: to = Infinity } = command;
    if (begin < from - BEFORE_MS || begin > to + AFTER_MS) continue;
    const distance = Math.max(0, from - begin, begin - to);
    if (distance < least) [nearest, least] = [command, distance];
  }
  const at = (spans, uuid) => spans.find((one) => one.gpu_uuid === uuid);
  return uuidPairs(nearest?.result).map(([old, next]) => [at(before, old), at(after, next)]).filter(([from, to]) => from && to);
}

// The curves between two stays. Without a command, the pairs of several GPUs are a guess.
function curves(kind, before, after, commands) {
  const known = applied(before, after, commands);
  const rest = (kind === "move" ? moved : paired)(before.filter(lacks(known.map(([from]) => from))), after.filter(lacks(known.map(([, to]) => to))));
  const isGuess = before.length - known.length > 1; // even one moved GPU: others may have changed places
  const told = known.filter(([from, to]) => kind !== "move" || from.gpu_uuid !== to.gpu_uuid);
  return [...told.map(([from, to]) => ({ from, to, isGuess: false })), ...rest.map(([from, to]) => ({ from, to, isGuess }))];
}

// The joints of a kind from spans to those of the next stay, or to nothing.
function joined(workload, kind, begin, end, before, next, giving) {
  const common = { workload, kind, begin, end, before, after: next?.spans ?? [] };
  if (!next) return before.map((from) => ({ ...common, from, to: null, isGuess: false }));
  return curves(kind, before, next.spans, giving.get(`${workload} ${kind}`) ?? []).map((curve) => ({ ...common, ...curve }));
}

// The joints of all workloads. Between two stays there is none in a time that is not loaded.
//   kind: "move", straight from GPU to GPU, or "parked", with time between.
//   begin, end: its times. The end Infinity: it goes on.
//   from, to: spans of the GPUs that it joins. to: null if no loaded stay follows.
//   isGuess: whether the pair is unknown. before, after: all spans that it may join.
export function jointsOf(spans, commands = []) {
  const giving = givingOf(commands);
  const byWorkload = new Map();
  for (const span of spans) {
    if (!span.workload_id) continue;
    if (!byWorkload.has(span.workload_id)) byWorkload.set(span.workload_id, []);
    byWorkload.get(span.workload_id).push(span);
  }
  const joints = [];
  for (const [workload, all] of byWorkload) {
    const stays = groupsOf(all.filter((one) => one.state === "LEASED"));
    const parkings = groupsOf(all.filter((one) => one.parked));
    let at = 0;
    for (const { begin, end, spans: before } of parkings) {
      const distance = (one) => Math.abs(one.begin - end);
      while (stays[at]?.begin < begin || (at + 1 < stays.length && distance(stays[at + 1]) < distance(stays[at]))) at += 1;
      // After an outage, the worker tells when the stay began, by its own clock.
      const next = stays[at] && distance(stays[at]) <= AFTER_MS ? stays[at] : null;
      joints.push(...joined(workload, "parked", begin, end, before, next, giving));
    }
    let parked = 0;
    for (const [before, next] of stays.slice(1).entries()) {
      const { end: begin, spans } = stays[before];
      if (begin === Infinity) continue;
      while (parkings[parked]?.end < begin) parked += 1;
      if (parkings[parked]?.begin <= next.begin) continue;
      // A very busy worker has no spans of some parked times.
      const kind = next.begin - begin < TOGETHER_MS ? "move" : "parked";
      joints.push(...joined(workload, kind, begin, next.begin, spans, next, giving));
    }
  }
  return joints;
}

// Hues that differ enough, each with lightness and chroma relative to the others (oklch).
const HUES = [[262, 0, 1], [50, 0, 1], [155, 0, 0.9], [335, 0, 1], [200, 0, 0.8], [25, -0.02, 1.05], [305, 0, 1], [105, 0.02, 0.85]];
const taken = new Map();

// The hue of a workload: by its id, or the next one if another workload in sight has that already.
export function hueOf(id) {
  if (!taken.has(id)) {
    let hash = 2166136261;
    for (const character of id) hash = Math.imul(hash ^ character.charCodeAt(0), 16777619);
    let at = (hash >>> 0) % HUES.length;
    const used = new Set([...taken.values()].slice(-HUES.length + 1));
    for (let tries = 0; used.has(at) && tries < HUES.length; tries += 1) at = (at + 1) % HUES.length;
    taken.set(id, at);
  }
  return HUES[taken.get(id)];
}

const MINUTE = 60000;
const DAY = 1440 * MINUTE;
const STEPS = [1000, 5000, 10000, 30000, MINUTE, 2 * MINUTE, 5 * MINUTE, 15 * MINUTE, 30 * MINUTE, 60 * MINUTE, 180 * MINUTE, 360 * MINUTE, 720 * MINUTE, DAY];

// The lines of the time axis: about one for each 110 px. The life of a workload may have many days.
export function ticksOf(start, end, width) {
  const least = ((end - start) * 110) / Math.max(1, width);
  const step = STEPS.find((one) => one >= least) ?? Math.ceil(least / DAY) * DAY;
  const offset = new Date(start).getTimezoneOffset() * MINUTE;
  const ticks = [];
  for (let time = Math.ceil((start - offset) / step) * step + offset; time <= end; time += step) ticks.push(time);
  return { ticks, step };
}

export function tickText(time, step) {
  const date = new Date(time);
  const two = (value) => String(value).padStart(2, "0");
  if (step >= DAY || (date.getHours() === 0 && date.getMinutes() === 0 && date.getSeconds() === 0)) return date.toLocaleDateString(undefined, { month: "short", day: "numeric" });
  return `${two(date.getHours())}:${two(date.getMinutes())}${step < MINUTE ? `:${two(date.getSeconds())}` : ""}`;
}

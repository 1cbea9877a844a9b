// The past of GPUs and workloads: what was where, and the joints between. Pure, without a picture.

// A move exchanges the lease at once, so one report has the end of the old spans and the begin of the new ones.
const TOGETHER_MS = 20;

// All spans of a workload as stays: groups of spans with one lease, in the order of time.
function staysOf(spans) {
  const stays = new Map();
  for (const span of spans) {
    if (span.state !== "LEASED") continue;
    // Two moves within one lease would otherwise look like one stay.
    const key = `${span.lease_id ?? ""} ${Math.round(span.begin_time / 500)}`;
    if (!stays.has(key)) stays.set(key, []);
    stays.get(key).push(span);
  }
  return [...stays.values()].map((group) => ({
    spans: group.sort((a, b) => (a.slot ?? 0) - (b.slot ?? 0)),
    begin: Math.min(...group.map((one) => one.begin_time)),
    end: Math.max(...group.map((one) => one.end_time ?? Infinity)),
  })).sort((a, b) => a.begin - b.begin);
}

function paired(before, after) {
  const count = before.length && after.length ? Math.max(before.length, after.length) : 0;
  return Array.from({ length: count }, (_, at) => [before[Math.min(at, before.length - 1)], after[Math.min(at, after.length - 1)]]);
}

// The pairs of a move. A GPU that the workload keeps is in none.
function moved(before, after) {
  const lacks = (spans) => (one) => !spans.some((other) => other.gpu_uuid === one.gpu_uuid);
  return paired(before.filter(lacks(after)), after.filter(lacks(before)));
}

// The joints of all workloads: from the end of one span to the begin of the next.
//   kind: "move", straight from GPU to GPU, or "parked", with time between. An open one goes on until now.
export function jointsOf(spans, isParked) {
  const byWorkload = new Map();
  for (const span of spans) {
    if (!span.workload_id) continue;
    if (!byWorkload.has(span.workload_id)) byWorkload.set(span.workload_id, []);
    byWorkload.get(span.workload_id).push(span);
  }
  const joints = [];
  for (const [workload, all] of byWorkload) {
    const stays = staysOf(all);
    for (let at = 0; at < stays.length; at += 1) {
      const stay = stays[at];
      const next = stays[at + 1];
      if (!next) {
        if (stay.end !== Infinity && isParked(workload)) for (const span of stay.spans) joints.push({ workload, kind: "parked", from: span, to: null });
        continue;
      }
      if (stay.end === Infinity) continue;
      const kind = next.begin - stay.end < TOGETHER_MS ? "move" : "parked";
      for (const [from, to] of kind === "move" ? moved(stay.spans, next.spans) : paired(stay.spans, next.spans)) joints.push({ workload, kind, from, to });
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
const STEPS = [1000, 5000, 10000, 30000, MINUTE, 2 * MINUTE, 5 * MINUTE, 15 * MINUTE, 30 * MINUTE, 60 * MINUTE, 180 * MINUTE, 360 * MINUTE, 720 * MINUTE, 1440 * MINUTE];

// The lines of the time axis: about one for each 110 px.
export function ticksOf(start, end, width) {
  const step = STEPS.find((one) => ((end - start) / one) * 110 <= width) ?? 1440 * MINUTE;
  const offset = new Date(start).getTimezoneOffset() * MINUTE;
  const ticks = [];
  for (let time = Math.ceil((start - offset) / step) * step + offset; time <= end; time += step) ticks.push(time);
  return { ticks, step };
}

export function tickText(time, step) {
  const date = new Date(time);
  const two = (value) => String(value).padStart(2, "0");
  if (step >= 1440 * MINUTE || (date.getHours() === 0 && date.getMinutes() === 0 && date.getSeconds() === 0)) return date.toLocaleDateString(undefined, { month: "short", day: "numeric" });
  return `${two(date.getHours())}:${two(date.getMinutes())}${step < MINUTE ? `:${two(date.getSeconds())}` : ""}`;
}

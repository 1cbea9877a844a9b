// The rows of the timeline: which GPUs it shows, where, and what lies on them. Heights in px.
import { live, workerName } from "/static/live.js";
import { jointsOf } from "/static/spans.js";
import { nameOf } from "/static/timeline_words.js";

export const ROW = 26;
export const HOST = 26; // the line with the name of a host
export const AXIS = 24;
export const LANE = 18; // one line of commands
export const LANES = 3;
export const HEAD = AXIS + LANES * LANE + 4; // what stays in sight above the rows

const BY_NAME = new Intl.Collator("en", { numeric: true });

// The layout for a time and a filter:
//   rows: { y, uuid, slot } or { y, host }; placed: y by UUID; spans, joints: those in sight; height: of all rows.
export function layOut(history, { start, end }, words) {
  const seen = [...history.spans.values()].filter((one) => one.begin_time < end && (one.end_time ?? Infinity) > start).sort((a, b) => a.begin_time - b.begin_time);
  const { rows, placed, height } = place(matching(gpusOf(seen), seen, words));
  const commands = new Map([...history.commands, ...live.commands]).values();
  // A stay in a hidden row counts too: without it, the stays around it would be joined.
  const isShown = ({ from, to, ...joint }) => placed.has(from.gpu_uuid) && placed.has((to ?? from).gpu_uuid) && joint.begin < end && joint.end > start;
  const joints = jointsOf(history.spans.values(), commands).filter(isShown);
  return { rows, placed, spans: seen.filter((one) => !one.parked), joints, height };
}

// What is known of GPUs that the live view does not have any more comes from their spans.
function gpusOf(spans) {
  const gpus = new Map();
  for (const gpu of live.gpus.values()) gpus.set(gpu.uuid, { uuid: gpu.uuid, slot: gpu.slot ?? 0, host: workerName(gpu.worker_id) });
  for (const span of spans) if (!gpus.has(span.gpu_uuid)) gpus.set(span.gpu_uuid, { uuid: span.gpu_uuid, slot: span.slot ?? 0, host: span.worker_name || span.worker_id });
  return [...gpus.values()];
}

// The GPUs whose host or workloads have all words.
function matching(gpus, spans, words) {
  if (!words.length) return gpus;
  const texts = new Map(gpus.map((one) => [one.uuid, [one.host]]));
  for (const span of spans) texts.get(span.gpu_uuid)?.push(nameOf(span));
  return gpus.filter((one) => {
    const text = texts.get(one.uuid).join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function place(gpus) {
  const rows = [];
  const placed = new Map();
  let y = 4;
  let host = null;
  for (const one of gpus.sort((a, b) => BY_NAME.compare(a.host, b.host) || a.slot - b.slot)) {
    if (one.host !== host) {
      host = one.host;
      rows.push({ y: y + HOST / 2, host });
      y += HOST;
    }
    rows.push({ y: y + ROW / 2, uuid: one.uuid, slot: one.slot });
    placed.set(one.uuid, y + ROW / 2);
    y += ROW;
  }
  return { rows, placed, height: y };
}

// The spans of the shown rows, in the order of rows and then of time.
export function spansInOrder({ spans, placed }) {
  return spans.filter((one) => placed.has(one.gpu_uuid)).sort((a, b) => placed.get(a.gpu_uuid) - placed.get(b.gpu_uuid) || a.begin_time - b.begin_time);
}

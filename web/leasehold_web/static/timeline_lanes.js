// The rows on top of the timeline: commands as bars from their creation to their end, and events as dots below.
import { staleSince } from "/static/live.js";
import { now } from "/static/server_time.js";
import { knownUntil } from "/static/timeline_words.js";
import { CONCLUDED, operationOf } from "/static/words.js";
import { AXIS, LANE, LANES } from "/static/timeline_rows.js";

const BAD_EVENT = /LOST|HEALTH|REFUSED|ERROR|STALE/;
const OTHER_EVENT = /^(COMMAND|WORKLOAD)/; // shown as commands and spans

// Draws them, and returns what is where, as { x1, x2, y1, y2, item }.
export function drawLanes(context, width, { labels, xOf }, colours, commands, events) {
  const hits = [];
  context.save();
  context.beginPath();
  context.rect(labels, AXIS, width, LANES * LANE + 3);
  context.clip();
  const taken = Array(LANES).fill(-Infinity); // until which x each lane is taken
  const present = Math.min(now(), staleSince() ?? Infinity);
  const endOf = ({ state, worker_id }) => (state === "UNKNOWN" ? Math.min(present, knownUntil(worker_id) || Infinity) : present);
  for (const command of [...commands].sort((a, b) => a.create_time - b.create_time)) {
    const x1 = xOf(command.create_time);
    // A user does not see the end of others' commands. Such a bar is short.
    const x2 = Math.max(x1 + 7, xOf(command.end_time ?? (CONCLUDED.has(command.state) ? command.create_time : endOf(command))));
    if (x2 < labels || x1 > width) continue;
    hits.push(drawCommand(context, command, x1, x2, labels, taken, colours));
  }
  for (const event of events) {
    const x = xOf(event.time);
    if (!event.kind || OTHER_EVENT.test(event.kind) || x < labels || x > width) continue;
    const y = AXIS + LANES * LANE - 1;
    context.fillStyle = BAD_EVENT.test(event.kind) ? colours.bad : colours.muted;
    context.beginPath();
    context.arc(x, y, 3, 0, 7);
    context.fill();
    hits.push({ x1: x - 4, x2: x + 4, y1: y - 5, y2: y + 5, item: { event } });
  }
  context.restore();
  return hits;
}

// A lane that is free gets the bar with its word, and otherwise the bar overlaps.
function drawCommand(context, command, x1, x2, labels, taken, colours) {
  const text = operationOf(command);
  context.font = `500 11px ${colours.font}`;
  const wide = context.measureText(text).width;
  let lane = taken.findIndex((until) => until < x1);
  const hasRoom = lane >= 0;
  if (!hasRoom) lane = taken.indexOf(Math.min(...taken));
  taken[lane] = hasRoom ? Math.max(x2, x1 + wide + 20) : x2;
  const y = AXIS + lane * LANE + LANE / 2 + 1;
  context.fillStyle = command.state === "SUCCEEDED" ? colours.good : CONCLUDED.has(command.state) ? colours.bad : colours.warn;
  context.beginPath();
  context.moveTo(x1, y - 6);
  context.lineTo(x1 + 5, y);
  context.lineTo(x1, y + 6);
  context.closePath();
  context.fill();
  context.fillRect(x1, y - 1, x2 - x1, 2);
  if (hasRoom) {
    const from = Math.max(x1 + 9, labels + 4);
    if (x2 - x1 > 12) {
      context.fillStyle = colours.surface;
      context.fillRect(from - 2, y - 7, wide + 4, 14);
    }
    context.fillStyle = colours.text;
    context.textBaseline = "middle";
    context.fillText(text, from, y);
  }
  return { x1: x1 - 2, x2: Math.max(x2, x1 + wide + 12), y1: y - 9, y2: y + 9, item: { command } };
}

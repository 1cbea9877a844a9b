// The picture of the timeline: its grid, rows, spans and joints.
import { beginOf, drawJoint, drawSpan, isOnParked, sized } from "/static/painter.js";
import { now } from "/static/server_time.js";
import { tickText, ticksOf } from "/static/spans.js";
import { drawLanes } from "/static/timeline_lanes.js";
import { AXIS, HEAD, HOST, LANE, LANES, ROW } from "/static/timeline_rows.js";
import { endOfJoint, isUnreported, lastReportOf, nameOf } from "/static/timeline_words.js";

const MINUTE = 60000;

// Draws the picture, and returns what is where, as { x1, x2, y1, y2, isHit, item }. A later one is above. isHit, if any,
// tells whether a point of the box counts.
//   box: its width, height and scrollTop; chosen, hovered: items; empty: the text of a picture without rows.
export function drawPicture(canvas, box, { time, layout, colours, chosen, hovered, commands, events, empty }) {
  const { width, height } = box;
  const context = sized(canvas, width, height);
  const scale = time.scale(width);
  const { labels, xOf } = scale;
  const present = now();
  drawGrid(context, width, height, time, scale, colours);
  context.save();
  clip(context, 0, HEAD, width, height);
  drawRows(context, width, height, layout.rows, HEAD - box.scrollTop, labels, colours);
  clip(context, labels, HEAD, width, height);
  const focus = hovered?.span?.workload_id ?? hovered?.joint?.workload ?? chosen?.span?.workload_id ?? "";
  const hits = drawContent(context, { height, offset: HEAD - box.scrollTop, time, scale, layout, colours, chosen, focus, present });
  context.restore();
  hits.push(...drawLanes(context, width, scale, colours, commands, events));
  if (present <= time.end && present >= time.start) {
    context.fillStyle = colours.accent;
    context.fillRect(Math.min(xOf(present), width - 2), AXIS, 1.5, height - AXIS);
  }
  if (!layout.rows.length) {
    context.fillStyle = colours.muted;
    context.font = `14px ${colours.font}`;
    context.textAlign = "center";
    context.fillText(empty, width / 2, height / 2);
    context.textAlign = "left";
  }
  return hits;
}

// The item at a point of the picture, or null.
export function itemAt(hits, x, y) {
  return hits.findLast((one) => x >= one.x1 && x <= one.x2 && y >= one.y1 && y <= one.y2 && (one.isHit?.(x, y) ?? true))?.item ?? null;
}

function clip(context, left, top, right, bottom) {
  context.beginPath();
  context.rect(left, top, right - left, bottom - top);
  context.clip();
}

function drawGrid(context, width, height, time, { labels, xOf }, colours) {
  const { ticks, step } = ticksOf(time.start, time.end, width - labels);
  context.font = `11px ${colours.font}`;
  context.textBaseline = "middle";
  for (const tick of ticks) {
    const x = xOf(tick);
    context.fillStyle = colours.line;
    context.fillRect(x, AXIS - 6, 1, height);
    context.fillStyle = colours.muted;
    if (x + 50 < width) context.fillText(tickText(tick, step), x + 4, AXIS / 2);
  }
  context.fillStyle = colours.strong;
  context.fillRect(0, HEAD - 1, width, 1);
  context.fillStyle = colours.muted;
  context.fillText(labels > 50 ? "commands" : "cmd", 6, AXIS + (LANES * LANE) / 2 + 1);
}

function drawRows(context, width, height, rows, offset, labels, colours) {
  context.textBaseline = "middle";
  for (const row of rows) {
    const y = row.y + offset;
    if (y < -ROW || y > height + ROW) continue;
    if (row.host) {
      context.fillStyle = colours.sunken;
      context.fillRect(0, y - HOST / 2 + 2, width, HOST - 4);
      context.font = `600 12px ${colours.font}`;
      context.fillStyle = colours.text;
      context.fillText(row.host, 8, y);
    } else {
      context.font = `12px ${colours.font}`;
      context.fillStyle = colours.muted;
      context.fillText(labels > 50 ? `GPU ${row.slot}` : `${row.slot}`, 12, y);
      context.fillStyle = colours.line;
      context.fillRect(labels, y + ROW / 2, width, 1);
    }
  }
}

// Spans, and the joints above them. Those of other workloads than the one in focus are dim.
function drawContent(context, { height, offset, time, scale, layout, colours, chosen, focus, present }) {
  const { labels, xOf } = scale;
  const { spans, joints, placed } = layout;
  const hits = [];
  const below = [];
  const isDim = (id) => Boolean(focus) && id !== focus;
  for (const span of spans) {
    const y = placed.get(span.gpu_uuid) + offset; // NaN without a row
    if (!(y >= HEAD - ROW && y <= height + ROW)) continue;
    const x1 = xOf(span.begin_time);
    const x2 = xOf(Math.min(span.end_time ?? present, time.end + MINUTE));
    drawSpan(context, span, x1, x2, y, colours, { dimFrom: xOf(lastReportOf(span) ?? Infinity), isDim: isDim(span.workload_id), isChosen: chosen?.span?.span_id === span.span_id, name: nameOf(span), isOpen: !span.end_time, left: labels });
    hits.push({ x1, x2: Math.max(x2, x1 + 4), y1: y - 11, y2: y + 11, item: { span } });
  }
  for (const joint of joints) {
    const y1 = placed.get(joint.from.gpu_uuid) + offset;
    const y2 = placed.get((joint.to ?? joint.from).gpu_uuid) + offset;
    if (Number.isNaN(y1 + y2)) continue;
    const x1 = beginOf(joint, xOf(joint.begin), xOf(present));
    const x2 = xOf(endOfJoint(joint, Math.min(present, time.end)));
    const busy = isBusy(joint, spans, present);
    drawJoint(context, joint, x1, y1, x2, y2, colours, { isDim: isDim(joint.workload), isOld: isUnreported(joint), isStrong: focus === joint.workload, isBusy: busy, present: xOf(present) });
    if (joint.kind === "move") hits.push({ x1: Math.min(x1 - 6, x2 + 6), x2: Math.max(x1 - 6, x2 + 6), y1: Math.min(y1, y2) + 8, y2: Math.max(y1, y2) - 8, item: { joint } });
    // Below the spans: others use the GPU while the workload is parked.
    else below.push({ x1, x2: Math.max(x2, x1 + 12), y1: Math.min(y1, y2) - ROW, y2: Math.max(y1, y2) + ROW, isHit: (x, y) => isOnParked(x, y, joint, x1, y1, x2, y2, busy), item: { joint } });
  }
  return [...below, ...hits];
}

// Whether another span is in the row of a parked workload meanwhile.
function isBusy({ from, begin, end }, spans, present) {
  const until = Math.min(end, present);
  return spans.some((one) => one.gpu_uuid === from.gpu_uuid && one.span_id !== from.span_id && one.state === "LEASED" && one.begin_time < until - 500 && (one.end_time ?? Infinity) > begin + 500);
}

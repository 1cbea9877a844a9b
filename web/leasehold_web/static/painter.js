// Draws spans and joints on a canvas, for the timeline and for the lane of one workload.
import { hueOf } from "/static/spans.js";

export const BAR = 17;
const GUTTER = 13; // from the middle of a row to its line
const MARK = 14; // the width of the two strokes of a parked time, with the begin of its line

// The colours of the sheet, read again when the scheme changes.
export function coloursOf(element) {
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(name).trim();
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  return {
    isDark, text: read("--text"), muted: read("--muted"), line: read("--line"), strong: read("--line-strong"), surface: read("--surface"), sunken: read("--sunken"), accent: read("--accent"), warn: read("--warn"), bad: read("--bad"), good: read("--good"), park: read("--park"),
    font: read("--sans"),
    // Oklch keeps the lightness of all hues alike, so that each has enough contrast.
    fill: (id) => {
      const [hue, lighter, chroma] = hueOf(id);
      return isDark ? `oklch(${0.75 + lighter / 2} ${0.115 * chroma} ${hue})` : `oklch(${0.54 + lighter} ${0.15 * chroma} ${hue})`;
    },
    onFill: isDark ? "#0c0e12" : "#ffffff",
  };
}

export function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// A span as a bar. Its state has a pattern as well as a colour. It is dim right of dimFrom.
export function drawSpan(context, span, x1, x2, y, colours, { dimFrom = Infinity, ...options } = {}) {
  const middle = Math.max(x1, Math.min(x2, dimFrom));
  if (middle < x2) drawBar(context, span, x1, x2, y, colours, { ...options, isDim: true });
  if (middle > x1 || middle >= x2) drawBar(context, span, x1, middle, y, colours, options);
}

function drawBar(context, span, x1, x2, y, colours, { isDim = false, isChosen = false, name = "", isOpen = false, left = 0 }) {
  const width = Math.max(2, x2 - x1);
  const top = y - BAR / 2;
  context.save();
  context.globalAlpha = isDim ? 0.22 : 1;
  context.beginPath();
  const round = Math.min(4, width / 2);
  context.roundRect(x1, top, width, BAR, isOpen ? [round, 0, 0, round] : round);
  if (span.state === "LEASED") {
    context.fillStyle = colours.fill(span.workload_id || span.span_id);
    context.fill();
    if (width > 34) {
      context.clip();
      context.fillStyle = colours.onFill;
      context.font = `600 11px ${colours.font}`;
      context.textBaseline = "middle";
      context.fillText(name, Math.max(x1, left) + 7, y + 0.5, Math.max(10, x2 - Math.max(x1, left) - 12));
    }
  } else {
    const colour = { CORDONED: colours.muted, UNHEALTHY: colours.bad, FOREIGN: colours.warn, RESERVED: colours.warn }[span.state] ?? colours.muted;
    context.save();
    context.clip();
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.globalAlpha *= 0.55;
    const gap = span.state === "FOREIGN" ? 4 : 7;
    context.beginPath();
    for (let x = Math.max(x1, -BAR) - BAR; x < Math.min(x2, 10000) + BAR; x += gap) {
      context.moveTo(x, top + BAR);
      context.lineTo(x + BAR, top);
    }
    context.stroke();
    context.restore();
    context.strokeStyle = colour;
    context.setLineDash(span.state === "RESERVED" ? [4, 3] : []);
    context.lineWidth = 1.2;
    context.beginPath();
    context.roundRect(x1 + 0.5, top + 0.5, width - 1, BAR - 1, round);
    context.stroke();
    if (width > 60) {
      context.fillStyle = colour;
      context.font = `500 11px ${colours.font}`;
      context.textBaseline = "middle";
      const word = span.state.toLowerCase();
      const wide = context.measureText(word).width;
      context.fillStyle = colours.surface;
      context.fillRect(Math.max(x1, left) + 5, top + 2, wide + 6, BAR - 4);
      context.fillStyle = colour;
      context.fillText(word, Math.max(x1, left) + 8, y + 0.5);
    }
  }
  if (isChosen) {
    context.restore();
    context.save();
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    context.beginPath();
    context.roundRect(x1 - 1.5, top - 1.5, width + 3, BAR + 3, 5);
    context.stroke();
  }
  context.restore();
}

// Where a joint begins: a parked time left of its begin, if its two strokes would be right of the present.
export const beginOf = (joint, x1, present) => (joint.kind === "move" ? x1 : Math.min(x1, present - MARK));

// A joint: a move as a solid curve with an arrow, a parked time as a dashed one with a pause sign at its begin. Nothing is
// right of the present.
export function drawJoint(context, joint, x1, y1, x2, y2, colours, { isDim = false, isOld = false, isStrong = false, isBusy = false, present = Infinity } = {}) {
  context.save();
  context.globalAlpha = isDim ? 0.15 : isOld ? 0.4 : 1;
  context.strokeStyle = colours.fill(joint.workload);
  context.fillStyle = colours.fill(joint.workload);
  context.lineWidth = isStrong ? 3 : joint.kind === "move" ? 2.2 : 1.6;
  context.lineCap = "round";
  context.beginPath();
  if (joint.kind === "move") {
    const bulge = 16 + Math.min(26, Math.abs(y2 - y1) / 6);
    context.moveTo(x1, y1);
    const room = Math.max(0, (present - x1) / 0.45); // at most 4/9 of the way to its first handle is right of x1
    context.bezierCurveTo(x1 + Math.min(bulge, room), y1, x2 - bulge, y2, x2 - 5, y2);
    context.stroke();
    arrow(context, x2, y2);
  } else {
    context.setLineDash([1.5, 4.5]);
    traceParked(context, joint, x1, y1, x2, y2, isBusy);
    context.stroke();
    context.setLineDash([]);
    for (const offset of [4, 8]) context.fillRect(x1 + offset, y1 - 5, 2.4, 10);
    if (joint.to) arrow(context, x2, y2);
  }
  context.restore();
}

// The line of a parked time, from its two strokes on.
function traceParked(context, { to }, x1, y1, x2, y2, isBusy) {
  const last = x2 - (to ? 8 : 0);
  context.moveTo(x1 + 12, y1);
  if ((y1 === y2 && !isBusy) || last - x1 < 40) {
    context.lineTo(last, y2);
    return;
  }
  // Below the row, where it crosses no bar of the row.
  const low = y1 + (y2 < y1 ? -GUTTER : GUTTER);
  const turn = Math.min(34, (last - x1) / 3);
  context.bezierCurveTo(x1 + 20, y1, x1 + 14, low, x1 + 26, low);
  context.lineTo(Math.max(x1 + 26, last - turn), low);
  context.bezierCurveTo(last - turn / 3, low, last - turn / 1.4, y2, last, y2);
}

const finder = document.createElement("canvas").getContext("2d");

// Whether a point is on the line of a parked time, or on its two strokes. Takes the places of drawJoint.
export function isOnParked(x, y, joint, x1, y1, x2, y2, isBusy) {
  if (x >= x1 && x <= x1 + 12 && Math.abs(y - y1) <= 8) return true;
  finder.lineWidth = 12;
  finder.beginPath();
  traceParked(finder, joint, x1, y1, x2, y2, isBusy);
  return finder.isPointInStroke(x, y);
}

function arrow(context, x, y) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - 8, y - 5);
  context.lineTo(x - 8, y + 5);
  context.closePath();
  context.fill();
}

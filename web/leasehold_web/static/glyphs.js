// One shape for each state, so that colour is never the only sign.
import { svg } from "/static/dom.js";

const FILL = { fill: "currentColor" };
const STROKE = { fill: "none", stroke: "currentColor", "stroke-width": "1.6", "stroke-linecap": "round", "stroke-linejoin": "round" };

const circle = ["circle", { cx: "7", cy: "7", r: "5.2", ...STROKE }];
const square = ["rect", { x: "1.8", y: "1.8", width: "10.4", height: "10.4", rx: "2.4", ...FILL }];
const dashed = ["rect", { x: "2", y: "2", width: "10", height: "10", rx: "2", ...STROKE, "stroke-dasharray": "2.6 2.4" }];
const triangle = [["path", { d: "M7 1.6 13 12.4H1z", ...STROKE }], ["path", { d: "M7 5.6v3", ...STROKE }], ["circle", { cx: "7", cy: "10.6", r: "0.9", ...FILL }]];
const cross = [circle, ["path", { d: "M5 5l4 4M9 5l-4 4", ...STROKE }]];
const check = [circle, ["path", { d: "M4.6 7.2 6.4 9l3.2-3.8", ...STROKE }]];
const pause = [["rect", { x: "2.6", y: "2", width: "3.2", height: "10", rx: "1", ...FILL }], ["rect", { x: "8.2", y: "2", width: "3.2", height: "10", rx: "1", ...FILL }]];
const play = ["path", { d: "M3.4 1.8v10.4L12 7z", ...FILL, stroke: "currentColor", "stroke-linejoin": "round" }];
const half = [circle, ["path", { d: "M7 1.8a5.2 5.2 0 0 1 0 10.400z", ...FILL }]];
const bar = [circle, ["path", { d: "M3.6 10.4 10.400 3.600", ...STROKE }]];
const disk = [["ellipse", { cx: "7", cy: "3.8", rx: "4.8", ry: "2", ...STROKE }], ["path", { d: "M2.200 3.800v6.400c0 1.100 2.100 2 4.800 2s4.800-.9 4.800-2V3.800", ...STROKE }]];
const moon = ["path", { d: "M9.800 8.800A5 5 0 0 1 5.200 2.200a5.200 5.200 0 1 0 6.600 6.600 5 5 0 0 1-2 0z", ...FILL }];
const dots = [["circle", { cx: "2.600", cy: "7", r: "1.4", ...FILL }], ["circle", { cx: "7", cy: "7", r: "1.4", ...FILL }], ["circle", { cx: "11.4", cy: "7", r: "1.4", ...FILL }]];
const diamond = ["path", { d: "M7 1.4 12.600 7 7 12.600 1.4 7z", ...STROKE }];
const question = [circle, ["path", { d: "M5.400 5.600c0-2 3.200-2 3.200 0 0 1.300-1.600 1.300-1.600 2.400M7 10v.1", ...STROKE }]];
const stop = ["rect", { x: "2.400", y: "2.400", width: "9.200", height: "9.200", rx: "1.200", ...STROKE }];

const SHAPES = {
  LEASED: [square], FREE: [circle], RESERVED: [dashed], CORDONED: bar, UNHEALTHY: triangle, FOREIGN: [diamond],
  PENDING: dots, RUNNING: [play], SUSPENDING: half, RESTORING: half, REMAPPING: half, STOPPING: half,
  SUSPENDED: pause, CHECKPOINTED: disk, SLEEPING: [moon], STOPPED: [stop],
  EXITED: check, RELEASED: check, FAILED: cross, ERROR: triangle, WEDGED: triangle, UNKNOWN: question,
  DISPATCHED: dots, ACCEPTED: dots, SUCCEEDED: check, REJECTED: cross, CANCELLED: bar, EXPIRED: cross,
  CONNECTED: [["circle", { cx: "7", cy: "7", r: "4.200", ...FILL }]], STALE: half, LOST: cross, UNCONFIRMED: dots, DISCONNECTED: [circle],
  ready: check, refused: cross,
};

const drawn = new Map(); // by state: a copy is made faster than a drawing

export function glyph(state) {
  if (!(state in SHAPES)) return svg("0 0 14 14", question, { class: `glyph g-${state}` });
  if (!drawn.has(state)) drawn.set(state, svg("0 0 14 14", SHAPES[state], { class: `glyph g-${state}` }));
  return drawn.get(state).cloneNode(true);
}

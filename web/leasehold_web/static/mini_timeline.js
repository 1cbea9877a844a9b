// The lane of one workload on its page: its GPUs from its creation until its end or now. A truncated history begins with
// its oldest loaded lease.
import { h, replace, safe } from "/static/dom.js";
import { History } from "/static/history.js";
import { live, onChange, placeOf } from "/static/live.js";
import { beginOf, coloursOf, drawJoint, drawSpan, sized } from "/static/painter.js";
import { now } from "/static/server_time.js";
import { jointsOf, tickText, ticksOf } from "/static/spans.js";
import { endOf, endOfJoint, isUnreported, lastReportOf, placeOfSpan } from "/static/timeline_words.js";
import { count, ENDED, moment } from "/static/words.js";

const ROW = 30;
const LABELS = 90;
const AXIS = 20;

// workload: its id; current: returns the workload, which the live view may lack after its end; commands: returns its
// loaded commands; onLoad: called after each answer, which may have names of deleted hosts.
export function miniTimeline(workload, current, commands = () => [], onLoad = () => {}) {
  const canvas = h("canvas", { role: "img" });
  const told = h("p", { class: "muted", role: "status" });
  const table = h("details", {});
  const element = h("div", { class: "mini" }, canvas, told, table);
  let isOver = false;
  const history = new History(() => {
    if (isOver) return;
    draw();
    onLoad();
  }, `&workload=${encodeURIComponent(workload)}`);

  // A user does not see the end of others' workloads. Such a lane ends with its last lease.
  function endOfLane(spans) {
    const { state, end_time: end } = current().status ?? {};
    if (end || !ENDED.has(state) || !spans.length) return end ?? now();
    return Math.max(...spans.map((one) => one.end_time ?? now()));
  }

  function draw() {
    // A reserved GPU is not used yet, and may never be.
    const all = [...history.spans.values()].filter((one) => one.state === "LEASED" || one.parked).sort((a, b) => a.begin_time - b.begin_time);
    const spans = all.filter((one) => !one.parked);
    const end = endOfLane(all);
    const isCut = history.isCut(0);
    const start = Math.min((!isCut && current().create_time) || end, all[0]?.begin_time ?? end) - 1000;
    const text = safe(history.problem || (isCut ? "The history is longer than one answer: this lane has the latest stays only." : ""));
    if (told.textContent !== text) told.textContent = text;
    // A deleted host has its names in the history only.
    const places = new Map(all.map((one) => [one.gpu_uuid, live.gpus.has(one.gpu_uuid) ? placeOf(one.gpu_uuid) : placeOfSpan(one)]));
    const rows = [...places.keys()].sort((a, b) => places.get(a).localeCompare(places.get(b), "en", { numeric: true }));
    const width = element.clientWidth || 600;
    const height = AXIS + Math.max(1, rows.length) * ROW;
    const context = sized(canvas, width, height);
    const colours = coloursOf(element);
    const x = (time) => LABELS + ((time - start) / Math.max(1, end - start)) * (width - LABELS - 14);
    const y = (uuid) => AXIS + rows.indexOf(uuid) * ROW + ROW / 2;
    context.font = `11px ${colours.font}`;
    context.textBaseline = "middle";
    const { ticks, step } = ticksOf(start, end, width - LABELS);
    for (const time of ticks) {
      context.fillStyle = colours.muted;
      context.fillText(tickText(time, step), x(time) + 3, AXIS / 2);
      context.fillStyle = colours.line;
      context.fillRect(x(time), 0, 1, height);
    }
    context.fillStyle = colours.text;
    for (const uuid of rows) context.fillText(places.get(uuid), 0, y(uuid), LABELS - 8);
    if (!rows.length) {
      context.fillStyle = colours.muted;
      context.fillText(history.known ? "It has held no GPU in the stored history." : history.problem ? "" : "Loading…", LABELS, AXIS + ROW / 2);
    }
    for (const joint of jointsOf(all, [...commands(), ...live.commands.values()])) drawJoint(context, joint, beginOf(joint, x(joint.begin), x(end)), y(joint.from.gpu_uuid), x(Math.min(end, endOfJoint(joint, end))), y(joint.to?.gpu_uuid ?? joint.from.gpu_uuid), colours, { isOld: isUnreported(joint), present: x(end) });
    for (const span of spans) drawSpan(context, span, x(span.begin_time), x(span.end_time ?? end), y(span.gpu_uuid), colours, { dimFrom: x(lastReportOf(span) ?? Infinity), name: span.workload_name, isOpen: !span.end_time });
    canvas.setAttribute("aria-label", `Timeline of the GPUs of this workload: ${count(spans.length, "stay")}. The table below has the same.`);
    const isOpen = table.open;
    replace(table, h("summary", {}, "As a table"), h("table", {}, h("thead", {}, h("tr", {}, ["GPU", "From", "To"].map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, spans.map((one) => h("tr", {}, h("td", {}, places.get(one.gpu_uuid)), h("td", {}, moment(one.begin_time)), h("td", {}, endOf(one)))))));
    table.open = isOpen;
  }

  const load = () => {
    history.forget();
    history.want((current().create_time ?? 0) - 1000, Infinity);
  };
  const endChanges = onChange((changes) => {
    if (changes.get("workload")?.has(workload)) setTimeout(load, 30);
  });
  const sizes = new ResizeObserver(draw);
  sizes.observe(element);
  const timer = setInterval(() => document.visibilityState === "visible" && draw(), 2000);
  load();
  return {
    element,
    end: () => {
      isOver = true;
      history.end();
      endChanges();
      sizes.disconnect();
      clearInterval(timer);
    },
  };
}


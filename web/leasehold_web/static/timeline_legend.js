// The legend of the timeline: a sample of each bar and joint.
import { h } from "/static/dom.js";
import { coloursOf, drawJoint, drawSpan, sized } from "/static/painter.js";

export function legend() {
  const sample = (draw) => {
    const canvas = h("canvas", { "aria-hidden": "true" });
    requestAnimationFrame(() => draw(sized(canvas, 44, 20), coloursOf(document.body)));
    return canvas;
  };
  const span = (state) => (context, colours) => drawSpan(context, { state, workload_id: "legend" }, 2, 42, 10, colours);
  const joint = (kind) => (context, colours) => drawJoint(context, { workload: "legend", kind, to: {} }, 3, kind === "move" ? 4 : 10, 41, kind === "move" ? 15 : 10, colours);
  return h("div", { class: "legend" }, [["leased", span("LEASED")], ["moved", joint("move")], ["parked", joint("parked")], ["reserved", span("RESERVED")], ["cordoned", span("CORDONED")], ["unhealthy", span("UNHEALTHY")], ["foreign", span("FOREIGN")]].map(([text, draw]) => h("span", {}, sample(draw), text)),
    h("span", {}, "Ctrl and wheel zoom, dragging moves"));
}

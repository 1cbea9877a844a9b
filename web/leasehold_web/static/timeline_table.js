// The spans of the timeline as a table.
import { h } from "/static/dom.js";
import { awaitsNames } from "/static/live.js";
import { endOf, lengthOf, nameOf, placeOfSpan } from "/static/timeline_words.js";
import { count, lower, moment } from "/static/words.js";

const LIMIT = 1000;
const HEADS = ["GPU", "State", "Workload", "From", "To", "Length"];

export function tableOf({ spans, placed }, { start, end }, isFiltered) {
  const all = spans.filter((one) => placed.has(one.gpu_uuid)).sort((a, b) => b.begin_time - a.begin_time);
  if (isFiltered && !all.length) return [h("p", { class: "muted" }, `No span from ${moment(start)} to ${moment(end)} matches the filter${awaitsNames() ? " yet" : ""}.`)];
  const order = all.length > LIMIT ? `of which the latest ${LIMIT.toLocaleString("en")} are shown` : "the latest first";
  return [h("p", { class: "muted" }, `${count(all.length, "span")} from ${moment(start)} to ${moment(end)}, ${order}.`),
    h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Spans" }, h("table", {}, h("thead", {}, h("tr", {}, HEADS.map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, all.slice(0, LIMIT).map(row))))];
}

function row(span) {
  const workload = span.workload_id ? h("a", { href: `/workloads/${encodeURIComponent(span.workload_id)}` }, nameOf(span)) : "";
  return h("tr", { "data-of": span.span_id }, h("td", {}, placeOfSpan(span)), h("td", {}, lower(span.state)), h("td", {}, workload), h("td", {}, moment(span.begin_time)), h("td", {}, endOf(span)), h("td", {}, span.end_time && lengthOf(span))); // the length of an open span would stand still
}

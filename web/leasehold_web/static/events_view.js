// Events, the latest first.
import { h } from "/static/dom.js";
import { withNames } from "/static/live.js";
import { lower, moment, when } from "/static/words.js";

export function eventsView(events) {
  if (!events.length) return h("p", { class: "muted" }, "No event yet.");
  return h("ul", { class: "events", tabindex: "0", "aria-label": "Events" }, events.map((one) => h("li", {}, h("time", { title: moment(one.time) }, when(one.time)), h("span", {}, withNames(one.message) || lower(one.kind), one.actor ? h("span", { class: "muted" }, ` · ${one.actor}`) : ""))));
}

export function merged(events, latest, wanted) {
  const all = new Map(events.map((one) => [one.event_id, one]));
  for (const one of latest) if (wanted(one)) all.set(one.event_id, one);
  return [...all.values()].sort((a, b) => (a.event_id < b.event_id ? 1 : -1)).slice(0, 200);
}

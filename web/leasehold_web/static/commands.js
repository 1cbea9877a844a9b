// Commands: those that go on, live, and then the past ones. One command by its id.
import { announce, append, ask, h, redraw, replace, setText, showProblem } from "/static/dom.js";
import { commandActions } from "/static/actions.js";
import { commandView } from "/static/command_view.js";
import { Listing } from "/static/listing.js";
import { areOld, awaitsNames, live, onChange, targetOf } from "/static/live.js";
import { learnFromHistory } from "/static/names.js";
import { actorOf, CONCLUDED, operationOf } from "/static/words.js";

const PAST_LIMIT = 500; // past commands of the list
const RETRY_MS = 2000; // after an answer that failed

export function show(main, id) {
  return id ? showOne(main, id) : showAll(main);
}

function showAll(main) {
  const search = h("input", { type: "search", placeholder: "Filter: operation, workload, actor, state", "aria-label": "Filter commands" });
  const counts = h("div", { class: "counts" });
  const going = h("div", {});
  const past = h("div", {});
  const more = h("button", { type: "button", onclick: () => loadMore() }, "Show older ones");
  const bound = h("p", { class: "muted", role: "status" });
  const problem = h("p", { class: "box bad", role: "alert", hidden: true });
  append(main, [h("div", { class: "head" }, h("h1", {}, "Commands"), counts, h("div", { class: "spacer" }), search),
    h("div", { class: "page stack" }, problem, h("section", { class: "card", "aria-label": "Under way" }, h("h2", {}, "Under way"), going), h("section", { class: "card", "aria-label": "Past" }, h("h2", {}, "Past"), past), bound, h("p", { class: "actions" }, more))]);
  const list = new Listing("/api/commands", "commands", "command_id", () => {
    more.disabled = false;
    setText(problem, list.problem);
    problem.hidden = !list.problem;
    draw();
    learnFromHistory([...list.entries.values()]).then(() => !isOver && draw());
  });
  let isOver = false;

  function loadMore() {
    more.disabled = true;
    list.load(!list.token);
  }

  // Returns the number of commands that match the filter.
  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [key, one] of live.commands) if ((list.entries.get(key)?.revision ?? 0) <= (one.revision ?? 0)) list.entries.set(key, one);
    const all = [...list.entries.values()].filter((one) => {
      const text = [operationOf(one), actorOf(one), one.state, one.command_id, targetOf(one)].join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    }).sort((a, b) => b.create_time - a.create_time);
    const [open, over] = [all.filter((one) => !CONCLUDED.has(one.state)), all.filter((one) => CONCLUDED.has(one.state))];
    replace(counts, list.pages > 0 && h("span", {}, h("b", {}, String(open.length)), "under way"));
    const without = !problem.hidden ? "The commands are not shown." : list.isLoading && "Loading…";
    replace(going, open.length ? open.map(line) : h("p", { class: "muted" }, words.length ? `No such command is under way${awaitsNames() ? " yet" : ""}.` : without || "No command is under way."));
    replace(past, over.length ? over.slice(0, PAST_LIMIT).map(line) : h("p", { class: "muted" }, words.length ? `No past command matches${awaitsNames() ? " yet" : amongLoaded()}.` : without || (list.token ? `No past command is${amongLoaded()}.` : "No command has ended yet.")));
    const isFull = over.length > PAST_LIMIT || (over.length === PAST_LIMIT && Boolean(list.token));
    setText(bound, isFull ? `The latest ${PAST_LIMIT} are shown.` : "");
    more.hidden = !list.problem && (isFull || !list.token);
    setText(more, list.token ? "Show older ones" : "Try again");
    return all.length;
  }

  const amongLoaded = () => (list.token ? " among the loaded ones: show older ones" : "");
  const line = (one) => commandView(one, { actions: [h("a", { href: `/commands/${encodeURIComponent(one.command_id)}` }, "Details"), commandActions(one)] });
  const end = onChange((changes) => {
    if (areOld(changes, "command")) list.renew();
    if (["command", "workload", "state"].some((kind) => changes.has(kind))) draw();
  });
  search.addEventListener("input", () => announce(`Matching commands: ${draw()}.`));
  loadMore();
  draw();
  return () => {
    isOver = true;
    end();
    list.end();
  };
}

function showOne(main, id) {
  const card = h("div", { class: "card whole" }, h("p", { class: "muted" }, "Loading…"));
  append(main, [h("div", { class: "page" }, h("div", { class: "title-line" }, h("h1", {}, "Command"), h("code", {}, id)), card)]);
  let latest = null;
  let isOver = false;

  const draw = () => {
    latest = live.commands.get(id) ?? latest;
    if (latest && !isOver) redraw(card, commandView(latest, { actions: commandActions(latest) }), h("details", {}, h("summary", {}, "All fields"), h("pre", { class: "output", tabindex: "0" }, JSON.stringify(latest, null, 2))));
  };
  async function load() {
    try {
      latest = await ask(`/api/commands/${encodeURIComponent(id)}`);
    } catch (error) {
      if (error.isTransient) setTimeout(() => !isOver && load(), RETRY_MS);
      if (!error.isTransient || !latest) showProblem(card, error.message);
      return;
    }
    draw();
    learnFromHistory([latest]).then(draw);
  }

  load();
  const end = onChange((changes) => {
    if (areOld(changes, "command", id)) load();
    else if (changes.get("command")?.has(id) || changes.has("state")) draw();
  });
  return () => {
    isOver = true;
    end();
  };
}

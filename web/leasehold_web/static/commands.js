// Commands: those that go on, live, and then the past ones. One command by its id.
import { append, ask, h, replace } from "/static/dom.js";
import { commandActions } from "/static/actions.js";
import { commandView } from "/static/command_view.js";
import { live, onChange, workloadName } from "/static/live.js";
import { learnFromHistory } from "/static/names.js";
import { CONCLUDED, operationOf, workloadsOf } from "/static/words.js";

export function show(main, id) {
  return id ? showOne(main, id) : showAll(main);
}

function showAll(main) {
  const search = h("input", { type: "search", placeholder: "Filter: operation, workload, actor, state", "aria-label": "Filter commands" });
  const counts = h("div", { class: "counts", role: "status" });
  const going = h("div", {});
  const past = h("div", {});
  const more = h("button", { type: "button", onclick: () => load() }, "Show older ones");
  const problem = h("p", { class: "box bad", role: "alert", hidden: true });
  append(main, [h("div", { class: "head" }, h("h1", {}, "Commands"), counts, h("div", { class: "spacer" }), search),
    h("div", { class: "page stack" }, problem, h("section", { class: "card", "aria-label": "Under way" }, h("h2", {}, "Under way"), going), h("section", { class: "card", "aria-label": "Past" }, h("h2", {}, "Past"), past), h("p", { class: "actions" }, more))]);
  const listed = new Map();
  let token = "";
  let isOver = false;

  async function load() {
    more.disabled = true;
    try {
      const page = await ask(`/api/commands?page_token=${encodeURIComponent(token)}`);
      for (const one of page.commands) listed.set(one.command_id, one);
      token = page.next_page_token;
      more.hidden = !token;
      problem.hidden = true;
      learnFromHistory(page.commands).then(() => !isOver && draw());
    } catch (error) {
      replace(problem, error.message);
      problem.hidden = false;
    }
    more.disabled = false;
    draw();
  }

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [key, one] of live.commands) if ((listed.get(key)?.revision ?? 0) <= (one.revision ?? 0)) listed.set(key, one);
    const all = [...listed.values()].filter((one) => {
      const text = [operationOf(one), one.actor, one.state, one.command_id, ...workloadsOf(one).map(workloadName)].join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    }).sort((a, b) => b.create_time - a.create_time);
    const [open, over] = [all.filter((one) => !CONCLUDED.has(one.state)), all.filter((one) => CONCLUDED.has(one.state))];
    replace(counts, (all.length > 0 || problem.hidden) && h("span", {}, h("b", {}, String(open.length)), "under way"));
    replace(going, open.length ? open.map(line) : h("p", { class: "muted" }, words.length ? "No such command is under way." : !problem.hidden ? "The commands are not shown." : "No command is under way."));
    replace(past, over.length ? over.slice(0, 500).map(line) : h("p", { class: "muted" }, words.length ? "No past command matches." : !problem.hidden ? "The commands are not shown." : "No command has ended yet."));
  }

  const line = (one) => commandView(one, { actions: [h("a", { href: `/commands/${encodeURIComponent(one.command_id)}` }, "Details"), commandActions(one)] });
  const end = onChange((changes) => (changes.has("command") || changes.has("workload")) && draw());
  search.addEventListener("input", draw);
  load();
  return () => {
    isOver = true;
    end();
  };
}

function showOne(main, id) {
  const card = h("div", { class: "card whole" }, h("p", { class: "muted" }, "Loading…"));
  append(main, [h("div", { class: "page" }, h("div", { class: "title-line" }, h("h1", {}, "Command"), h("code", {}, id)), card)]);
  let listed = null;
  const draw = () => {
    const latest = live.commands.get(id) ?? listed;
    if (latest) replace(card, commandView(latest, { actions: commandActions(latest) }), h("details", {}, h("summary", {}, "All fields"), h("pre", { class: "output", tabindex: "0" }, JSON.stringify(latest, null, 2))));
  };
  ask(`/api/commands/${encodeURIComponent(id)}`).then((found) => {
    listed = found;
    draw();
    learnFromHistory([found]).then(draw);
  }).catch((error) => replace(card, h("p", { class: "box bad", role: "alert" }, error.message)));
  return onChange((changes) => changes.get("command")?.has(id) && draw());
}

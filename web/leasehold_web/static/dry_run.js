// The dry run of a dialog: a plan for each of its actions. The plans are asked for one after another, since each asks the
// worker. Each is shown as it comes, and an error stands in the place of its plan.
import { ask, h, replace } from "/static/dom.js";
import { readSession, withNames } from "/static/live.js";
import { measured, planView, tiersOf } from "/static/plan_view.js";
import { bytes, lower } from "/static/words.js";

const TIERS = { HOST: "host memory", DISK: "disk space" };

// What all plans together lack. Each plan is compared with all of a tier.
function shortages(plans) {
  if (plans.length < 2) return [];
  const sums = new Map();
  let unknown = 0; // only the applications know
  for (const { tier, needed_bytes: needed, available_bytes: available = Infinity } of plans.flatMap(tiersOf)) {
    const sum = sums.get(tier) ?? { needed: 0, available };
    sums.set(tier, { needed: sum.needed + (needed ?? 0), available: Math.min(sum.available, available) });
    if (needed === undefined) unknown += 1;
  }
  const more = unknown ? [`${unknown === 1 ? "One of these plans is" : `${unknown} of these plans are`} of unknown size, and in no sum.`] : [];
  return [...sums].filter(([, sum]) => sum.needed > sum.available).map(([tier, sum]) => [`Together, these plans need ${bytes(sum.needed)} of ${TIERS[tier] ?? lower(tier)}, and `, measured("span", bytes(sum.available)), " are available. The last workloads are refused, or parked elsewhere if their policy permits: stop some workloads first."]).concat(more);
}

export class DryRun {
  // element: has the plans; signal: ends the questions; onPlan: called with each plan; onEnd: called after the last
  // answer, with whether all plans are there and none has a refusal, and the number of those that failed. The number is
  // undefined if no plan was asked for.
  constructor(element, { signal, onPlan, onEnd }) {
    this.element = element;
    this.signal = signal;
    this.onPlan = onPlan;
    this.onEnd = onEnd;
    this.parts = new Map(); // { name, action, box, plan, isAsked } of each plan, by its name, action and basis as JSON
    this.isAsking = false;
    this.warning = h("div", { role: "status" });
    element.append(this.warning);
  }

  // Shows the plans of these actions, each { name, action, basis }, and of no others. Asks for those that lack, also if
  // the basis of a known plan has changed.
  show(actions) {
    if (this.signal.aborted) return;
    const wanted = new Map(actions.map((one) => [JSON.stringify(one), one]));
    for (const [key, { box }] of this.parts) {
      if (wanted.has(key)) continue;
      box.remove();
      this.parts.delete(key);
    }
    let last = this.warning;
    for (const [key, one] of wanted) {
      if (!this.parts.has(key)) {
        const part = { ...one, box: h("section", { tabindex: "-1" }) };
        this.parts.set(key, part);
        last.after(part.box);
        this.wait(part);
      }
      last = this.parts.get(key).box;
    }
    this.warn();
    this.askAll();
  }

  warn() {
    const found = shortages([...this.parts.values()].map(({ plan }) => plan).filter((plan) => plan && !plan.refusals?.length));
    replace(this.warning, found.length > 0 && h("div", { class: "box warn" }, h("ul", {}, found.map((one) => h("li", {}, one)))));
  }

  wait(part) {
    part.isAsked = false;
    part.plan = undefined;
    this.draw(part, h("p", { class: "muted", role: "status" }, "Asking the worker for the plan…"));
  }

  draw({ box, name }, ...content) {
    replace(box, name && h("h3", {}, name), ...content);
  }

  async askAll() {
    if (this.isAsking) return;
    this.isAsking = true;
    let part;
    let hasAsked = false;
    while (!this.signal.aborted && (part = [...this.parts.values()].find((one) => !one.isAsked))) {
      part.isAsked = hasAsked = true;
      await this.askFor(part);
    }
    this.isAsking = false;
    if (this.signal.aborted) return;
    const plans = [...this.parts.values()].map(({ plan }) => plan);
    const failed = plans.filter((plan) => !plan).length;
    this.onEnd(!failed && plans.every((plan) => !plan.refusals?.length), hasAsked ? failed : undefined);
  }

  async askFor(part) {
    try {
      const { plans } = await ask("/api/plan", { body: part.action, signal: this.signal });
      if (!part.box.isConnected) return; // outdated
      this.draw(part, planView(plans[0], part.action.action), plans[0].refusals?.length > 0 && h("p", {}, this.again(part)));
      part.plan = plans[0];
      this.warn();
      this.onPlan(part.plan);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.reason === "NOT_PERMITTED") readSession().catch(() => {}); // the role may have changed
      const again = error.isTransient && this.again(part);
      this.draw(part, h("div", { class: "box bad", role: "alert" }, withNames(error.message), again && ". ", again));
    }
  }

  // A later plan may be another one.
  again(part) {
    return h("button", { type: "button", onclick: () => this.askAgain(part) }, "Ask again");
  }

  askAgain(part) {
    part.box.focus(); // the button goes
    this.wait(part);
    this.askAll();
  }
}

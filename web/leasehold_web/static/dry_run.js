// The dry run of a dialog: a plan for each of its actions. The plans are asked for one after another, since each asks the
// worker. Each is shown as it comes, and an error stands in the place of its plan.
import { ask, h, replace } from "/static/dom.js";
import { readSession, withNames } from "/static/live.js";
import { planView } from "/static/plan_view.js";

export class DryRun {
  // element: has the plans; signal: ends the questions; onPlan: called with each plan; onEnd: called after the last
  // answer, with whether all plans are there and none has a refusal.
  constructor(element, { signal, onPlan, onEnd }) {
    this.element = element;
    this.signal = signal;
    this.onPlan = onPlan;
    this.onEnd = onEnd;
    this.parts = []; // { name, action, box, plan, isAsked } of each plan
    this.isAsking = false;
  }

  // Shows the plans of actions, each { name, action }.
  show(actions) {
    for (const one of actions) {
      const part = { ...one, box: h("section", { tabindex: "-1" }) };
      this.parts.push(part);
      this.element.append(part.box);
      this.wait(part);
    }
    return this.askAll();
  }

  wait(part) {
    part.isAsked = false;
    this.draw(part, h("p", { class: "muted", role: "status" }, "Asking the worker for the plan…"));
  }

  draw({ box, name }, ...content) {
    replace(box, name && h("h3", {}, name), ...content);
  }

  async askAll() {
    if (this.isAsking) return;
    this.isAsking = true;
    let part;
    while (!this.signal.aborted && (part = this.parts.find((one) => !one.isAsked))) {
      part.isAsked = true;
      await this.askFor(part);
    }
    this.isAsking = false;
    if (!this.signal.aborted) this.onEnd(this.parts.every(({ plan }) => plan && !plan.refusals?.length));
  }

  async askFor(part) {
    try {
      const { plans } = await ask("/api/plan", { body: part.action, signal: this.signal });
      this.draw(part, planView(plans[0]));
      part.plan = plans[0];
      this.onPlan(part.plan);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.reason === "NOT_PERMITTED") readSession().catch(() => {}); // the role may have changed
      const again = error.isTransient && h("button", { type: "button", onclick: () => this.askAgain(part) }, "Ask again");
      this.draw(part, h("div", { class: "box bad", role: "alert" }, withNames(error.message), again && ". ", again));
    }
  }

  askAgain(part) {
    part.box.focus(); // the button goes
    this.wait(part);
    this.askAll();
  }
}

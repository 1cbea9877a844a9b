// How long ago a time was, as text that stays right while the page is shown.
import { h } from "/static/dom.js";
import { ago, UNKNOWN } from "/static/words.js";

const RENEWAL_MS = 5000;

export function age(time, properties = {}) {
  return time === undefined ? UNKNOWN : h("time", { ...properties, "data-at": time }, ago(time));
}

function renew() {
  if (document.visibilityState !== "visible") return;
  for (const element of document.querySelectorAll("time[data-at]")) {
    const text = ago(Number(element.dataset.at));
    if (element.textContent !== text) element.textContent = text;
  }
}

setInterval(renew, RENEWAL_MS);
document.addEventListener("visibilitychange", renew);

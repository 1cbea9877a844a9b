// Clicks on parts that a change draws anew between press and release. The browser gives such a click to no link.
// A held Enter clicks once: its repetitions would press the buttons that get the focus next, such as those of a dialog.
import { purpose } from "/static/dom.js";

const PARTS = "a, button";
let pressed = null;

document.addEventListener("keydown", (event) => {
  if (event.repeat && event.key === "Enter") event.preventDefault();
}, true);

document.addEventListener("pointerdown", (event) => {
  pressed = event.target.closest?.(PARTS) ?? null;
}, true);

document.addEventListener("pointerup", (event) => {
  const before = pressed;
  pressed = null;
  if (!before || before.isConnected || event.button !== 0) return;
  const part = document.elementFromPoint(event.clientX, event.clientY)?.closest(PARTS);
  if (part?.localName !== before.localName || purpose(part) !== purpose(before)) return;
  const { ctrlKey, metaKey, shiftKey, altKey } = event;
  part.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true, detail: event.detail || 1, ctrlKey, metaKey, shiftKey, altKey }));
}, true);

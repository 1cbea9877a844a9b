// The event streams of this window. A browser has six connections to a server. So a hidden window closes all of its
// streams, and opens them again when it is shown. Of all windows, only the one that was used last has an output.
const HIDDEN_MS = 30000; // how long a hidden window keeps its streams
const streams = new Set();
const windows = new BroadcastChannel("leasehold-output"); // a message: the time at which its window took the output
let takenAt = 0; // when this window took the output
let isReleased = false;
let timer = 0;

export function areReleased() {
  return isReleased;
}

// Adds a stream, as { open, close }. Each call of open opens the stream unless it is open. An output also has pause,
// which is called when another window takes the output, and isPaused. Returns how to remove the stream.
export function addStream(stream) {
  streams.add(stream);
  if (!isReleased) open(stream);
  return () => {
    streams.delete(stream);
    stream.close();
  };
}

// A window that is hidden from its start takes the output from no other.
function open(stream) {
  if (stream.pause) {
    if (document.visibilityState === "hidden") return;
    take();
  }
  stream.open();
}

function take() {
  takenAt = performance.timeOrigin + performance.now();
  windows.postMessage(takenAt);
}

// A window can be hidden from its start.
function follow() {
  clearTimeout(timer);
  if (document.visibilityState === "hidden") {
    timer = setTimeout(release, HIDDEN_MS);
    return;
  }
  isReleased = false;
  for (const stream of streams) open(stream);
}

function release() {
  isReleased = true;
  for (const stream of streams) stream.close();
}

document.addEventListener("visibilitychange", follow);
// A paused output goes on once its window is used, also if the window has had the focus all the time.
for (const kind of ["focus", "pointerdown", "keydown"]) {
  window.addEventListener(kind, () => {
    for (const stream of streams) if (stream.isPaused?.() && !isReleased) open(stream);
  }, { capture: true, passive: true });
}
windows.addEventListener("message", ({ data }) => {
  if (data < takenAt) return; // the messages of two windows have crossed, and the later one counts
  for (const stream of streams) stream.pause?.();
});
follow();

// The event streams of this window. A browser has six connections to a server. So a hidden window closes all of its
// streams, and opens them again when it is shown. Of all windows, only the one that was used last has an output.
const HIDDEN_MS = 30000; // how long a hidden window keeps its streams
const streams = new Set();
const windows = new BroadcastChannel("leasehold-output"); // a message: its window has the output now
let isReleased = false;
let timer = 0;

export function areReleased() {
  return isReleased;
}

// Adds a stream, as { open, close }. Each call of open opens the stream unless it is open. An output also has pause,
// which is called when another window takes the output. Returns how to remove the stream.
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
    windows.postMessage("");
  }
  stream.open();
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
window.addEventListener("focus", () => {
  for (const stream of streams) if (stream.pause && !isReleased) open(stream);
});
windows.addEventListener("message", () => {
  for (const stream of streams) stream.pause?.();
});
follow();

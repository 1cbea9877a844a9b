// Fills the form from the link that a program printed: its part after # never reaches a server or a log.
const field = document.getElementById("token");

// Returns whether the address had a token.
function fill() {
  const found = /^#token=([\w.~+/=-]{1,8192})$/.exec(location.hash);
  if (!found) return false;
  history.replaceState(null, "", location.pathname + location.search);
  field.value = found[1];
  // The user presses the button: any site could link here with the token of somebody else.
  document.querySelector("#login button").focus();
  return true;
}

// A link that is opened in a window with this page only changes the part after #.
window.addEventListener("hashchange", fill);
if (!fill() && !document.querySelector(".refusal")) {
  // A link from another site comes without the cookie, which is strict. The session may still be there.
  const answer = await fetch("/api/session", { headers: { Accept: "application/json" } }).catch(() => null);
  if (answer?.ok) location.replace(document.getElementById("next").value);
}

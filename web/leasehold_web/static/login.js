// Logs in with the token of a link that a program printed: its part after # never reaches a server or a log.
const field = document.getElementById("token");
const found = /^#token=([\w.~+/=-]{1,8192})$/.exec(location.hash);

if (found) {
  history.replaceState(null, "", "/login");
  field.value = found[1];
  document.getElementById("login").requestSubmit();
} else if (!document.querySelector(".refusal")) {
  // A link from another site comes without the cookie, which is strict. The session may be there all the same.
  const answer = await fetch("/api/session", { headers: { Accept: "application/json" } }).catch(() => null);
  if (answer?.ok) location.replace("/");
}

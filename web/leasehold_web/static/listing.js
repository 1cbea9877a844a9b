// A list of the API, the newest first. It is loaded page by page, and anew once its entries may be old. A load that
// failed is repeated if the same question may have an answer soon.
import { ask } from "/static/dom.js";

const RETRY_MS = 2000; // after the first answer that failed, and twice as long after each further one
const RETRY_LIMIT_MS = 60000;
const RENEWAL_MS = 300; // how long the reasons for a renewal are gathered

export class Listing {
  // path: the path of the API; kind: the field of an answer that has the entries; key: the field of an entry that has
  // its id; onLoad: called after each answer or error.
  constructor(path, kind, key, onLoad) {
    Object.assign(this, { path, kind, key, onLoad });
    this.entries = new Map();
    this.token = ""; // of the next page
    this.pages = 0;
    this.problem = "";
    this.isLoading = false;
    this.isOld = false;
    this.hasFailedAnew = false; // the next load is one anew, too
    this.timer = 0;
    this.retry = 0; // the timer after an answer that failed
    this.retryMs = RETRY_MS;
    this.isOver = false;
  }

  // Loads the next page, or anew all pages so far. A renewal that is wanted meanwhile follows.
  async load(isRenewal = false) {
    this.isOld ||= isRenewal;
    if (this.isLoading) return;
    clearTimeout(this.retry);
    this.isLoading = true;
    let isTransient = false;
    do {
      const isAnew = this.isOld || this.hasFailedAnew;
      let { entries, token, pages } = isAnew ? { entries: new Map(), token: "", pages: 0 } : this;
      this.isOld = isTransient = false;
      try {
        do {
          const page = await ask(`${this.path}?page_token=${encodeURIComponent(token)}`);
          for (const one of page[this.kind]) entries.set(one[this.key], one);
          token = page.next_page_token;
          pages += 1;
        } while (token && pages < this.pages);
        Object.assign(this, { entries, token, pages, problem: "", hasFailedAnew: false, retryMs: RETRY_MS });
      } catch (error) {
        isTransient = error.isTransient;
        this.problem = `${error.message}${isTransient ? ". The page tries again by itself." : ""}`;
        this.hasFailedAnew = isAnew;
      }
    } while (this.isOld);
    this.isLoading = false;
    if (isTransient && !this.isOver) {
      this.retry = setTimeout(() => this.load(), this.retryMs);
      this.retryMs = Math.min(2 * this.retryMs, RETRY_LIMIT_MS);
    }
    this.onLoad();
  }

  // Loads all pages so far anew, soon.
  renew() {
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      this.load(true);
    }, RENEWAL_MS);
  }

  end() {
    this.isOver = true;
    clearTimeout(this.timer);
    clearTimeout(this.retry);
    this.onLoad = () => {};
  }
}

// A list of the API, the newest first. It is loaded page by page, and anew once its entries may be old.
import { ask } from "/static/dom.js";

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
  }

  // Loads the next page, or anew all pages so far. A renewal that is wanted meanwhile follows.
  async load(isRenewal = false) {
    this.isOld ||= isRenewal;
    if (this.isLoading) return;
    this.isLoading = true;
    do {
      const isAnew = this.isOld || this.hasFailedAnew;
      let { entries, token, pages } = isAnew ? { entries: new Map(), token: "", pages: 0 } : this;
      this.isOld = false;
      try {
        do {
          const page = await ask(`${this.path}?page_token=${encodeURIComponent(token)}`);
          for (const one of page[this.kind]) entries.set(one[this.key], one);
          token = page.next_page_token;
          pages += 1;
        } while (token && pages < this.pages);
        Object.assign(this, { entries, token, pages, problem: "", hasFailedAnew: false });
      } catch (error) {
        this.problem = error.message;
        this.hasFailedAnew = isAnew;
      }
    } while (this.isOld);
    this.isLoading = false;
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
    clearTimeout(this.timer);
    this.onLoad = () => {};
  }
}

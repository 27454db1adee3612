// The frame around a page: where one can go, the address bar, the back button, and a page that changes while one looks.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";
  const AGAIN = 2000; // milliseconds between two looks at a page that may change
  const SHARE = 20; // ... and at least so many times as long as one look takes: it takes at most a twentieth of a core
  const SOON = 4; // ... a quarter while a part of the page is missing and somebody waits for it
  const NAV = [["Runs", "runs"], ["Prompts and weights", "resources"], ["Chat", "chat"]];

  const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

  // What a running console answers. `seen` is what is drawn already; the answer is then only that it is the same.
  lightning.served = (server) => ({
    show: (address, seen) => server.show({address, seen}),
    act: (name, given, address) => server.act({name, arguments: given, address}),
    href: (address) => `?page=${encodeURIComponent(address)}`,
    here: () => new URLSearchParams(location.search).get("page") || "",
    put: (address, replace) => history[replace ? "replaceState" : "pushState"]({}, "", `?page=${encodeURIComponent(address)}`),
    changed: "popstate",
    nav: NAV,
  });

  // What an exported folder has: pages in scripts of their own, which are loaded when they are first opened.
  lightning.exported = (index) => {
    const pages = new Map();
    const waiting = new Map();
    lightning.page = (page) => {
      pages.set(page.address, page);
      (waiting.get(page.address) || (() => {}))();
    };
    const load = (address) => new Promise((done, failed) => {
      if (pages.has(address)) return done();
      waiting.set(address, done);
      const script = document.createElement("script");
      script.src = `data/${index.files[address]}`;
      script.onerror = () => failed(new Error(`${script.src} is not there`));
      document.head.append(script);
    });
    return {
      show: async (address) => {
        if (!(address in index.files)) return {page: missing(address, index)};
        await load(address);
        return {page: pages.get(address)};
      },
      href: (address) => (address in index.files ? `#${encodeURIComponent(address)}` : ""),
      here: () => decodeURIComponent(location.hash.slice(1)) || index.start,
      put: (address, replace) => {
        const hash = `#${encodeURIComponent(address)}`;
        if (location.hash !== hash) replace ? location.replace(hash) : (location.hash = hash);
      },
      changed: "hashchange",
      nav: NAV.filter(([, to]) => to in index.files),
      said: index.said,
    };
  };

  function missing(address, index) {
    const notice = {text: "This page is not part of the exported folder.", tone: "muted", detail: index.said, links: [{text: "the first page", to: index.start}], commands: [], key: ""};
    return {address, title: "Not exported", trail: [], live: false, previous: "", next: "",
      blocks: [{component: "Notices", title: "", note: "", value: {notices: [notice], empty: ""}}]};
  }

  lightning.start = (host, source) => {
    const make = (name, attributes, ...children) => {
      const made = document.createElement(name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      made.append(...children);
      return made;
    };
    const said = make("p", {class: "shell-said", role: "status", hidden: ""});
    const links = new Map(source.nav.map(([text, to]) => [to, make("a", {href: source.href(to) || "#", "data-to": to}, text)]));
    const leave = make("form", {class: "shell-leave", method: "post", action: "logout", hidden: ""}, make("button", {}, "Log out"));
    const where = make("span", {class: "shell-where"});
    const bar = make("nav", {class: "shell-bar", "aria-label": "the console"}, make("strong", {}, "lightning"), ...links.values(), where, leave);
    const body = make("div", {class: "shell-page"});
    host.replaceChildren(bar, said, body);
    if (source.said) where.textContent = source.said;

    const memory = new Map();
    let at = ""; // the address that is wanted
    let seen = ""; // what is drawn of it
    let turn = 0; // counts what was asked for, so that a late answer to something older is dropped

    const say = (text) => {
      said.textContent = text;
      said.hidden = !text;
    };

    const contextOf = (address) => ({
      address,
      open: (to) => open(to),
      link: (to) => source.href(to),
      act: source.act && (async (name, given) => {
        const answer = await source.act(name, given, address);
        if (answer.error) throw new Error(answer.error);
        setTimeout(() => look(), 0);
        return answer.said;
      }),
      remember: (key, ...value) => {
        if (value.length) memory.set(key, value[0]);
        return memory.get(key);
      },
    });

    const draw = (answer) => {
      seen = answer.digest || "";
      lightning.draw(body, answer.page, contextOf(answer.page.address));
      const first = answer.page.address.split(/[/?]/)[0];
      const chosen = first === "chat" || first === "resources" ? first : "runs";
      for (const [to, link] of links) link.toggleAttribute("data-here", to === chosen);
      if (answer.where !== undefined) where.textContent = answer.where;
      leave.hidden = !answer.leave;
    };

    // Ask until there is an answer; while the console is gone, say so and go on asking.
    async function look() {
      const mine = ++turn;
      const address = at;
      host.setAttribute("aria-busy", "true");
      for (let wait = AGAIN; mine === turn; wait = Math.min(2 * wait, 15000)) {
        const begun = Date.now();
        try {
          const answer = await source.show(address, seen);
          if (mine !== turn) return;
          say("");
          host.removeAttribute("aria-busy");
          host.removeAttribute("data-opening");
          if (!answer.same) draw(answer);
          if (answer.live) later(mine, Math.max(AGAIN, (answer.partial ? SOON : SHARE) * (Date.now() - begun)));
          return;
        } catch (error) {
          if (mine !== turn) return;
          if (/unauthorized/i.test(String(error))) return location.reload(); // the token was revoked, or has expired
          say(`The console does not answer; it is asked again. (${(error && error.message) || error})`);
        }
        await sleep(wait);
      }
    }

    async function later(mine, milliseconds) {
      await sleep(milliseconds);
      while (document.hidden && mine === turn) await sleep(AGAIN);
      if (mine === turn) look();
    }

    function open(address, how = "push") {
      if (how === "push" && address !== at) source.put(address, false);
      if (address !== at) {
        seen = "";
        host.setAttribute("data-opening", ""); // shown until the page is there
      }
      at = address;
      look();
    }

    bar.addEventListener("click", (event) => {
      const link = event.target.closest("a[data-to]");
      if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
      event.preventDefault();
      open(link.dataset.to);
    });
    addEventListener(source.changed, () => {
      if (source.here() !== at) open(source.here(), "back");
    });
    open(source.here(), "first");
  };
})();

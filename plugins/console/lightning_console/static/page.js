// lightning.draw(element, page, context): a whole page from its JSON, and the same again where it changed.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";
  const KEYS = [
    ["[", "the page before: previous step, rollout, …"], ["]", "the page after"], ["/", "the first filter"],
    ["← → ↑ ↓", "from one to the next in a timeline, a tree, a chart or tokens"], ["Home End", "the first, the last"],
    ["Enter", "open what is chosen"], ["Esc", "close what is open"], ["?", "these keys"],
  ];
  const states = new WeakMap();
  let shown = null; // the state of the page that keys are for

  lightning.draw = (element, page, context) => {
    const state = states.get(element) || begin(element);
    const pathOf = (address) => address.split("?")[0];
    const same = state.page && pathOf(state.page.address) === pathOf(page.address);
    state.page = page;
    state.context = context;
    shown = state;
    const focus = whereFocusIs(state);
    state.drawing = true; // a field that goes away while somebody types in it says that it changed: nobody chose that
    drawHead(state, page);
    drawBlocks(state, page, same);
    state.drawing = false;
    if (same) giveFocus(state, focus);
    else if (state.drawn) arrive(state);
    state.drawn = true;
    state.root.setAttribute("data-address", page.address);
    document.title = `${page.title} · lightning`;
  };

  function begin(element) {
    const {make} = lightning;
    const state = {blocks: new Map(), memory: new Map(), drawn: false};
    state.head = make("header", {});
    state.main = make("main", {class: "blocks"});
    state.tip = make("div", {class: "tip", role: "tooltip", id: `tip-${Math.random().toString(36).slice(2)}`, hidden: true});
    state.help = help();
    state.root = make("div", {class: "lightning"}, state.head, state.main, state.tip, state.help);
    element.replaceChildren(state.root);
    states.set(element, state);
    state.root.addEventListener("click", (event) => followed(state, event));
    hints(state);
    if (!window.lightning.listening) {
      window.lightning.listening = true;
      document.addEventListener("keydown", pressed);
    }
    return state;
  }

  // A plain click opens an address here; with a modifier the browser does what it does with links.
  function followed(state, event) {
    const anchor = event.target.closest("a[data-to]");
    if (!anchor || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    state.context.open(anchor.getAttribute("data-to"));
  }

  function drawHead(state, page) {
    const json = JSON.stringify([page.title, page.name, page.trail, page.live, page.partial, page.waits, page.previous, page.next, page.address]);
    if (state.headJson === json) return;
    state.headJson = json;
    const {make, link, hint} = lightning;
    const {context} = state;
    const trail = (page.trail || []).flatMap((at, index) => [
      index ? make("span", {"aria-hidden": "true", class: "slash"}, "/") : null, link(context, at.to, {"data-key": `trail ${index}`}, at.text)]);
    const turn = (to, text, key) => to && link(context, to, {class: "turn", "data-key": text, "aria-keyshortcuts": key}, text, make("kbd", {}, key));
    state.title = make("h1", {tabindex: "-1"}, page.title);
    const name = page.name ? lightning.copyable(page.name) : null;
    if (name) name.classList.add("id");
    state.head.replaceChildren(
      make("div", {class: "above"},
        make("nav", {"aria-label": "where this page is"}, trail),
        make("div", {class: "turns"}, turn(page.previous, "Previous", "["), turn(page.next, "Next", "]"),
          hint(make("button", {type: "button", class: "keys", "data-key": "keys", "aria-label": "keys of this page", click: () => state.help.showModal()}, "?"), "Keys of this page"))),
      make("div", {class: "titled"}, state.title, page.waits ? make("span", {class: "waits"}, "the console tries again by itself") :
        page.partial ? make("span", {class: "waits"}, "reading …") :
        page.live ? hint(make("span", {class: "live"}, "live"), "The page may still change, and follows the run.") : null), name || "");
  }

  function drawBlocks(state, page, same) {
    const counted = new Map();
    const wanted = page.blocks.map((block) => {
      const name = `${block.component} ${block.title}`;
      const nth = counted.get(name) || 0;
      counted.set(name, nth + 1);
      return {block, key: `${name} ${nth}`, json: JSON.stringify(block)};
    });
    const kept = new Set(wanted.map(({key}) => key));
    for (const [key, old] of state.blocks) {
      if (same && kept.has(key)) continue;
      old.section.remove();
      state.blocks.delete(key);
    }
    wanted.forEach(({block, key, json}, index) => {
      const old = state.blocks.get(key);
      const section = old ? old.section : lightning.make("section", {class: `block ${block.component}`, "data-block": key});
      if (state.main.children[index] !== section) state.main.insertBefore(section, state.main.children[index] || null);
      section.setAttribute("data-width", widthOf(page.blocks, index));
      if (old && old.json === json) return;
      state.blocks.set(key, {section, json});
      drawBlock(state, section, block, key);
    });
  }

  // Small charts stand in threes and ordinary ones in twos; all else takes the whole width.
  function widthOf(blocks, index) {
    const kind = (at) => (blocks[at] && blocks[at].component === "Chart" ? (blocks[at].value.small ? "third" : "half") : "whole");
    const mine = kind(index);
    if (mine !== "half") return mine;
    let first = index;
    let last = index;
    while (kind(first - 1) === "half") first--;
    while (kind(last + 1) === "half") last++;
    return (last - first) % 2 === 0 && index === last ? "whole" : "half";
  }

  function drawBlock(state, section, block, key) {
    const scrolled = [...section.querySelectorAll("[data-scrolls]")].map((at) => [at.scrollLeft, at.scrollTop]);
    section.style.minHeight = `${section.offsetHeight}px`; // the page's length stays while it is drawn, and so where one reads
    const body = lightning.make("div", {class: "body"});
    const title = block.title && lightning.make("h2", {}, lightning.hint(lightning.make("span", {}, block.title), block.hint));
    const parts = [body, block.note && lightning.make("p", {class: "note"}, block.note)].filter(Boolean);
    if (block.folded) section.replaceChildren(folded(state, key, title, parts));
    else section.replaceChildren(...[title, ...parts].filter(Boolean));
    const draw = lightning.components[block.component];
    try {
      if (!draw) throw Error(`there is no component ${block.component}`);
      draw(body, block.value, contextOf(state, block, key));
    } catch (error) {
      body.replaceChildren(lightning.empty(`This part of the page cannot be drawn: ${error.message}`));
      console.error(error);
    }
    section.style.minHeight = "";
    section.querySelectorAll("[data-scrolls]").forEach((at, index) => scrolled[index] && at.scrollTo(...scrolled[index]));
  }

  // A block that opens at a click on its title, and stays open while the page is drawn again.
  function folded(state, key, title, parts) {
    const name = `open ${key}`;
    const details = lightning.make("details", {class: "fold", toggle: () => state.memory.set(name, details.open)},
      lightning.make("summary", {}, title), ...parts);
    details.open = Boolean(state.memory.get(name));
    return details;
  }

  // The shell's context as a block sees it: with its title, and always with a memory.
  function contextOf(state, block, key) {
    const here = (name, ...value) => (value.length ? state.memory.set(name, value[0]) && value[0] : state.memory.get(name));
    return {
      title: block.title,
      get key() { return `${state.page.address.split("?")[0]} ${key}`; },
      get address() { return state.page.address; },
      get act() { return state.context.act; },
      open: (address) => state.drawing || state.context.open(address),
      link: (address) => state.context.link(address),
      remember: (...named) => (state.context.remember || here)(...named),
    };
  }

  function whereFocusIs(state) {
    const at = document.activeElement;
    if (!at || !state.root.contains(at)) return null;
    const section = at.closest("[data-block]");
    const within = section || (state.head.contains(at) ? state.head : null);
    if (!within) return null;
    const path = [];
    for (let up = at; up !== within; up = up.parentElement) path.unshift([...up.parentElement.children].indexOf(up));
    const typed = at.matches("input, textarea") && at.type !== "checkbox" ? {value: at.value, from: at.selectionStart, to: at.selectionEnd} : null;
    return {at, block: section && section.getAttribute("data-block"), key: at.getAttribute("data-key"), path, typed, name: at.tagName};
  }

  function giveFocus(state, focus) {
    if (!focus || (focus.at.isConnected && document.activeElement === focus.at)) return;
    const within = focus.block === null ? state.head : (state.blocks.get(focus.block) || {}).section;
    if (!within) return;
    let at = focus.key ? within.querySelector(`[data-key="${CSS.escape(focus.key)}"]`) : null;
    if (!at && !focus.key) at = focus.path.reduce((up, index) => up && up.children[index], within);
    if (!at || at.tagName !== focus.name) return;
    at.focus({preventScroll: true});
    if (focus.typed) {
      at.value = focus.typed.value;
      at.setSelectionRange(focus.typed.from, focus.typed.to);
    }
  }

  // Another page: from its beginning, and said to those who hear it.
  function arrive(state) {
    state.root.scrollIntoView({block: "start"});
    state.title.focus({preventScroll: true});
  }

  function help() {
    const {make} = lightning;
    const rows = KEYS.map(([keys, what]) => make("tr", {}, make("th", {scope: "row"}, keys.split(" ").map((key) => make("kbd", {}, key))), make("td", {}, what)));
    return make("dialog", {class: "help", "aria-label": "Keys", click: (event) => event.target === event.currentTarget && event.currentTarget.close()},
      make("div", {}, make("h2", {}, "Keys"), make("table", {}, make("tbody", {}, rows)),
        make("form", {method: "dialog"}, make("button", {}, "Close"))));
  }

  function pressed(event) {
    const state = shown;
    if (!state || !state.root.isConnected || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") state.hideHint();
    if (event.target.closest && event.target.closest("input, textarea, select, [contenteditable=true], dialog")) return;
    const turn = {"[": state.page.previous, "]": state.page.next}[event.key];
    if (turn) state.context.open(turn);
    else if (event.key === "?") state.help.showModal();
    else if (event.key === "/") {
      const filter = state.main.querySelector(".Controls input") || state.main.querySelector(".Controls select, .Controls button");
      if (!filter) return;
      filter.focus();
      if (filter.select) filter.select();
    } else return;
    event.preventDefault();
  }

  // Hints by pointer, keyboard and touch: one box for all, which never leaves the window.
  function hints(state) {
    const {root, tip} = state;
    let owner = null;
    const hide = () => {
      if (owner) owner.removeAttribute("aria-describedby");
      owner = null;
      tip.hidden = true;
    };
    const show = (event) => {
      const at = event.target.closest && event.target.closest("[data-hint]");
      if (at === owner && at) return;
      hide();
      if (!at) return;
      owner = at;
      tip.textContent = at.getAttribute("data-hint");
      tip.hidden = false;
      at.setAttribute("aria-describedby", tip.id);
      const box = at.getBoundingClientRect();
      const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8));
      const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
      tip.style.left = `${left}px`;
      tip.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - tip.offsetHeight - 6)}px`;
    };
    state.hideHint = hide;
    root.addEventListener("pointerover", show);
    root.addEventListener("focusin", show);
    root.addEventListener("focusout", hide);
    root.addEventListener("pointerleave", hide);
    addEventListener("scroll", hide, {passive: true, capture: true});
  }
})();

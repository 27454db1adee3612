// What several components use: elements, links, numbers, hints, ticks. Nothing here runs before a page is drawn, so scripts load in any order.
// Every text of a page becomes a text node; no script here makes markup of it.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const SIGNS = {good: "✓", bad: "✕", warn: "!", up: "▲", down: "▼"};
  const SAID = {good: "good", bad: "bad", warn: "warning", up: "above", down: "below"};

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (typeof value === "function") element.addEventListener(name, value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat()) {
      if (child === undefined || child === null || child === "") continue;
      element.append(child);
    }
    return element;
  }

  // An element; functions among the attributes are listeners, strings among the children are text.
  const make = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
  const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

  // A link to an address, or the same as plain text where it leads nowhere (an export has not every page).
  function link(context, to, attributes, ...children) {
    const href = to ? context.link(to) : "";
    if (!href) return make("span", attributes, ...children);
    return make("a", {...attributes, href, "data-to": to}, ...children);
  }

  // The sign that stands beside a tone's colour.
  function sign(tone) {
    return SIGNS[tone] ? make("span", {class: "sign", "aria-label": SAID[tone], role: "img"}, SIGNS[tone]) : null;
  }

  // A text that pointer, keyboard and touch can ask for; `page.js` shows it.
  function hint(element, text, focusable = true) {
    if (!text) return element;
    element.setAttribute("data-hint", text);
    if (focusable && !element.matches("a, button, input, select")) element.setAttribute("tabindex", "0");
    return element;
  }

  // A text in which a long name may break after its signs, and not in the middle of a word.
  function breaking(text) {
    if (!/\S{17}/.test(text)) return [text];
    return text.split(/(?<=[./_:=,@-])(?=\w)/).flatMap((part, index) => (index ? [make("wbr"), part] : [part]));
  }

  // A number as people read it: at most four digits that matter, a real minus.
  function number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    if (!Number.isFinite(value)) return String(value);
    const size = Math.abs(value);
    let text;
    if (size !== 0 && (size < 1e-4 || size >= 1e9)) text = value.toExponential(2);
    else if (Number.isInteger(value) || size >= 10 ** digits) text = Math.round(value).toLocaleString("en-US").replaceAll(",", " ");
    else text = String(Number(value.toPrecision(digits)));
    return text.replace(/^-/, "−").replace("e-", "e−");
  }

  const signed = (value, digits) => (value > 0 ? "+" : "") + number(value, digits);

  // An address with options changed; an empty value takes one away.
  function having(address, changes) {
    const [path, query] = address.split(/\?(.*)/s);
    const options = new URLSearchParams(query || "");
    for (const [name, value] of Object.entries(changes)) {
      if (value === "" || value === null) options.delete(name);
      else options.set(name, value);
    }
    const text = options.toString();
    return path + (text ? `?${text}` : "");
  }

  // Round values that cover low..high, about `wanted` of them; whole ones only where `whole`.
  function ticks(low, high, wanted = 5, whole = false) {
    if (!(high > low)) return [low];
    const rough = (high - low) / Math.max(1, wanted);
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.7);
    if (whole) step = Math.max(1, step === 2.5 * power && power < 10 ? 5 * power : Math.round(step));
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  }

  // Numbers of one axis or column, all with as many decimals.
  function labels(values) {
    const decimals = Math.max(0, ...values.map((value) => (String(value).includes("e") ? 0 : (String(value).split(".")[1] || "").length)));
    return values.map((value) => (decimals && Math.abs(value) < 1e4 ? value.toFixed(decimals).replace(/^-/, "−") : number(value)));
  }

  // A mean, a return, an advantage: two decimals, so that they stand below one another.
  const short = (value) => (value === null || value === undefined || Math.abs(value) >= 1000 ? number(value, 3) : value.toFixed(2).replace(/^-/, "−"));

  // Characters that nobody sees, or that turn the text around them, as signs.
  function visible(text) {
    if (text === "") return "∅";
    return text.replaceAll(" ", "·").replaceAll("\t", "⇥").replaceAll("\r", "␍")
      .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
        (sign) => `⟨${sign.codePointAt(0).toString(16)}⟩`)
      .replaceAll("\n", "⏎\n");
  }

  // One of many is in the tab order, and keys go from it to others: `move(key, index)` says to which, or undefined.
  function rove(container, items, start, move, chosen) {
    let current = Math.max(0, Math.min(start, items.length - 1));
    items.forEach((item, index) => item.setAttribute("tabindex", index === current ? "0" : "-1"));
    const choose = (index) => {
      items[current].setAttribute("tabindex", "-1");
      current = index;
      items[current].setAttribute("tabindex", "0");
      chosen(index);
    };
    container.addEventListener("focusin", (event) => {
      const index = items.indexOf(event.target.closest("[data-roved]"));
      if (index >= 0) choose(index);
    });
    container.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !event.target.closest("[data-roved]")) return;
      const next = move(event.key, current);
      if (next === undefined) return;
      event.preventDefault();
      if (items[next]) items[next].focus();
    });
    items.forEach((item, index) => {
      item.setAttribute("data-roved", "");
      item.setAttribute("data-key", `item ${index}`);
    });
  }

  // A command or text to take along.
  function copyable(text) {
    const said = make("span", {class: "said", role: "status"});
    const code = make("code", {}, text);
    const copy = async () => {
      try {
        await navigator.clipboard.writeText(text);
        said.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
        said.textContent = "selected: press Ctrl+C";
      }
      setTimeout(() => { said.textContent = ""; }, 2500);
    };
    return make("div", {class: "command"}, code, make("button", {type: "button", click: copy}, "Copy"), said);
  }

  const empty = (text) => make("p", {class: "empty"}, text);

  Object.assign(window.lightning, {make, svg, link, sign, hint, breaking, number, signed, labels, short, having, ticks, visible, rove, copyable, empty});
})();

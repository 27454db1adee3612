// A conversation as people read it: who, what, and the arguments and results as JSON that can be read.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";
  const LONG = 1600; // characters shown of a long text before it is opened
  const LINES = 24;
  const PROMPT = 7; // messages of a prompt from which on those between its first and its last are folded
  const ROLES = ["system", "user", "assistant", "tool", "state", "reward", "judge", "note"];
  const DEEP = 24; // below it JSON is not broken into lines

  lightning.components.Messages = (element, value, context) => {
    const {make} = lightning;
    if (!value.messages.length) return element.append(lightning.empty("no messages were recorded"));
    const items = value.messages.map((message, index) => one(message, index, context));
    element.append(make("ol", {class: "messages"}, folded(value.messages, items, context)));
  };

  // A long prompt (instructions and examples) is folded to its first and its last message.
  function folded(messages, items, context) {
    const {make} = lightning;
    const until = messages.findIndex((message) => message.made);
    const key = `Messages ${context.key} prompt`;
    if (until < PROMPT || context.remember(key) === true) return items;
    const hidden = items.slice(1, until - 1);
    const button = make("button", {type: "button", class: "more", "data-key": "prompt", click: () => {
      context.remember(key, true);
      button.parentElement.replaceWith(...hidden);
    }}, `Show ${hidden.length} more messages of the prompt`);
    return [items[0], make("li", {class: "fold"}, button), ...items.slice(until - 1)];
  }

  function one(message, index, context) {
    const {make, link, sign} = lightning;
    const role = message.made ? "the model" : message.role === "assistant" ? "assistant, in the prompt" : message.role;
    return make("li", {class: `message ${ROLES.includes(message.role) ? message.role : "other"} ${message.made ? "made" : ""} ${message.tone}`.trim()},
      make("div", {class: "who"}, make("span", {class: "role"}, role), sign(message.tone),
        message.to ? link(context, message.to, {class: "tag", "data-key": `message ${index}`}, message.tag || "show its call") : make("span", {class: "tag"}, message.tag)),
      make("div", {class: "says"}, message.text ? long(message.text, `text ${index}`, context) : null,
        message.data.map(([name, text], at) => data(name, text, `data ${index} ${at}`, context)),
        !message.text && !message.data.length ? make("p", {class: "empty"}, "(empty)") : null));
  }

  // The beginning of a long text, and a button for all of it; what was opened stays open.
  function long(text, name, context) {
    const {make} = lightning;
    const key = `Messages ${context.key} ${name}`;
    const begin = beginning(text);
    const box = make("div", {class: "text"});
    const lasting = make("div", {}, box);
    if (begin.length === text.length) box.textContent = text;
    else {
      const draw = () => {
        const open = context.remember(key) === true;
        box.textContent = open ? text : `${begin} …`;
        button.textContent = open ? "Show less" : `Show all (${lightning.number(text.length)} characters)`;
        button.setAttribute("aria-expanded", String(open));
      };
      const button = make("button", {type: "button", class: "more", "data-key": name, click: () => { context.remember(key, context.remember(key) !== true); draw(); }});
      lasting.append(button);
      draw();
    }
    return lasting;
  }

  function beginning(text) {
    let end = Math.min(text.length, text.length > LONG * 1.25 ? LONG : text.length);
    let line = -1;
    for (let count = 0; count < LINES; count++) {
      line = text.indexOf("\n", line + 1);
      if (line < 0 || line >= end) return text.slice(0, end);
    }
    const rest = text.slice(line).split("\n", 8).length;
    return rest > 6 ? text.slice(0, Math.min(end, line)) : text.slice(0, end);
  }

  function data(name, text, at, context) {
    const {make} = lightning;
    const pretty = lightning.prettyJson(text);
    const key = `Messages ${context.key} ${at}`;
    const small = pretty.length <= 600 && pretty.split("\n").length <= 12;
    const kept = context.remember(key);
    const box = make("details", {open: kept === undefined ? small : kept},
      make("summary", {"data-key": at}, make("span", {class: "name"}, name), small ? null : make("span", {class: "size"}, `${lightning.number(pretty.length)} characters`)),
      make("pre", {"data-scrolls": true}, pretty));
    box.addEventListener("toggle", () => box.isConnected && context.remember(key, box.open));
    return box;
  }

  // JSON in lines, or the text as it is where it is none. Its tokens stay as they were written, so that long numbers lose no digit;
  // what fits into a line stands in one.
  lightning.prettyJson = (text) => {
    try {
      const value = JSON.parse(text);
      return typeof value === "string" ? value : lined(text);
    } catch {
      return text;
    }
  };

  function lined(text) {
    const tokens = text.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g);
    let at = 0;
    const read = (depth) => {
      const token = tokens[at++];
      if (token !== "{" && token !== "[") return token;
      const close = token === "{" ? "}" : "]";
      const members = [];
      while (tokens[at] !== close) {
        const first = read(depth + 1);
        if (token === "{") at++; // the colon
        members.push(token === "{" ? `${first}: ${read(depth + 1)}` : first);
        if (tokens[at] === ",") at++;
      }
      at++;
      const line = token + members.join(", ") + close;
      if (depth > DEEP || (line.length <= 84 - 2 * depth && !line.includes("\n"))) return line;
      return `${token}\n${members.map((member) => "  ".repeat(depth + 1) + member).join(",\n")}\n${"  ".repeat(depth)}${close}`;
    };
    return read(0);
  }
})();

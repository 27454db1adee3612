// A call's tokens, coloured by a measure; a chosen one says its values and why it was pushed.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";
  const STEPS = 7; // shades on each side of 0, and of a scale from least to most
  const PART = 300; // tokens at least of one piece of the strip, which ends with a line: what is not on the screen is not laid out
  const LARGE = 3000; // tokens from which on pieces off the screen are left for later
  const LONGEST = 3000; // tokens at most of one

  // The shade of a value about 0, whose strongest is `most`: n7 ... n1, z, p1 ... p7.
  lightning.bin = (value, most) => {
    const shade = Math.min(STEPS, Math.ceil((Math.abs(value) / (most || 1)) * STEPS - 1e-9));
    return shade === 0 ? "z" : (value > 0 ? "p" : "n") + shade;
  };

  // How a measure is coloured: {classOf(value), low, high, cut}; the strongest hundredth does not take all shades.
  lightning.scaleOf = (measure) => {
    const known = measure.values.filter((value) => value !== null && Number.isFinite(value));
    if (!known.length) return {classOf: () => "x", low: 0, high: 0, cut: false, values: []};
    if (measure.about === "diverging") {
      const sizes = Float64Array.from(known, Math.abs).sort();
      const most = quantile(sizes.filter((size) => size > 0), 0.99) || 1;
      return {classOf: (value) => lightning.bin(value, most), low: -most, high: most, cut: sizes[sizes.length - 1] > most, values: []};
    }
    const sorted = Float64Array.from(known).sort();
    const distinct = [...new Set(sorted)].length <= STEPS ? [...new Set(sorted)] : [];
    if (distinct.length && distinct.every(Number.isInteger)) {
      const at = (value) => (distinct.length === 1 ? STEPS : Math.round((distinct.indexOf(value) * STEPS) / (distinct.length - 1)));
      return {classOf: (value) => `s${at(value)}`, low: distinct[0], high: distinct[distinct.length - 1], cut: false, values: distinct};
    }
    const [low, high] = [quantile(sorted, 0.01), quantile(sorted, 0.99)];
    const shade = (value) => Math.round(Math.max(0, Math.min(1, (value - low) / (high - low || 1))) * STEPS);
    return {classOf: (value) => `s${shade(value)}`, low, high, cut: sorted[0] < low || sorted[sorted.length - 1] > high, values: []};
  };

  const quantile = (sorted, share) => sorted[Math.round((sorted.length - 1) * share)];

  lightning.components.TokenStrip = (element, value, context) => {
    const {make, number} = lightning;
    if (!value.texts.length) return element.append(lightning.empty("no tokens were recorded of this call"));
    const state = {value, context, spans: [], chosen: -1, key: `TokenStrip ${context.key}`};
    state.strip = make("div", {class: value.texts.length > LARGE ? "strip large" : "strip", tabindex: "0", role: "listbox", "aria-label": "tokens", "data-key": "strip", "data-scrolls": true, translate: "no", dir: "ltr"});
    state.detail = make("aside", {class: "why", "aria-live": "polite"});
    state.legend = make("div", {class: "legend"});
    if (value.prompt_left_out) state.strip.append(make("div", {class: "left-out"}, `${number(value.prompt_left_out)} tokens of the prompt before these are left out`));
    fill(state);
    element.append(measures(state), state.legend,
      make("div", {class: "with-why"}, make("div", {}, state.strip,
        make("p", {class: "note"}, `${number(value.texts.length)} tokens, the first ${number(value.prompt)} given (grey), the rest sampled. · is a space, ⏎ the end of a line.`)), state.detail));
    colour(state);
    listen(state);
    const first = state.spans[value.prompt];
    if (first) state.strip.scrollTop = first.getBoundingClientRect().top - state.strip.getBoundingClientRect().top - 70; // what was sampled, and a few lines before it
    const kept = context.remember(state.key);
    choose(state, kept < value.texts.length ? kept : -1, false);
  };

  // One span for each token, in parts.
  function fill(state) {
    const {texts, prompt} = state.value;
    for (let from = 0, to; from < texts.length; from = to) {
      const part = document.createElement("div");
      part.className = "part";
      to = lightning.partEnd(texts, from);
      for (let at = from; at < to; at++) {
        const span = document.createElement("span");
        const text = lightning.visible(texts[at]);
        span.textContent = text[0] === "·" || at < 1 ? `\u200b${text}` : text; // a line may break before a word, as it does at spaces
        span.i = at;
        span.given = at < prompt ? "t given" : "t";
        state.spans.push(span);
        part.append(span);
      }
      state.strip.append(part);
    }
  }

  lightning.partEnd = (texts, from) => {
    const most = Math.min(texts.length, from + LONGEST);
    for (let to = from + PART; to < most; to++) if (texts[to - 1].endsWith("\n")) return to;
    return most;
  };

  function measures(state) {
    const {make} = lightning;
    const names = state.value.measures.map((measure) => measure.name);
    const kept = state.context.remember("TokenStrip measure");
    const first = state.value.measures.findIndex((measure) => !measure.missing);
    state.measure = names.includes(kept) ? names.indexOf(kept) : Math.max(0, first);
    return make("div", {class: "controls"}, make("div", {class: "control", role: "group", "aria-label": "coloured by"}, make("span", {class: "name"}, "Coloured by"),
      make("div", {class: "segments"}, names.map((name, index) => lightning.hint(make("button", {type: "button", "data-key": `measure ${name}`, "aria-pressed": String(index === state.measure),
        click: (event) => {
          state.measure = index;
          state.context.remember("TokenStrip measure", name);
          event.currentTarget.parentElement.querySelectorAll("button").forEach((button, at) => button.setAttribute("aria-pressed", String(at === index)));
          colour(state);
        }}, name), state.value.measures[index].hint)))));
  }

  function colour(state) {
    const measure = state.value.measures[state.measure];
    const scale = measure && !measure.missing ? lightning.scaleOf(measure) : null;
    state.spans.forEach((span, at) => {
      const value = scale ? measure.values[at] : null;
      const wanted = span.given + (value === null || value === undefined ? "" : ` ${scale.classOf(value)}`) + (at === state.chosen ? " chosen" : "");
      if (span.className !== wanted) span.className = wanted;
    });
    state.legend.replaceChildren(...legend(measure, scale));
  }

  function legend(measure, scale) {
    const {make, number, signed} = lightning;
    if (!measure) return [];
    if (!scale) return [make("span", {class: "entry"}, `${measure.name}: ${measure.missing}`)];
    const unit = measure.unit ? ` ${measure.unit}` : "";
    const none = measure.values.some((value) => value === null) ? make("span", {class: "entry"}, make("i", {class: "swatch x"}), "no value") : "";
    if (scale.values.length) return [...scale.values.map((value) => make("span", {class: "entry"}, make("i", {class: `swatch ${scale.classOf(value)}`}), `${number(value)}${unit}`)), none];
    const diverging = measure.about === "diverging";
    const bound = (value, sign) => `${scale.cut ? `${sign} ` : ""}${diverging ? signed(value, 3) : number(value, 3)}`;
    return [make("span", {class: "entry"}, make("span", {class: "end"}, bound(scale.low, "≤")), make("i", {class: `ramp ${diverging ? "diverging" : "sequential"}`}),
      make("span", {class: "end"}, `${bound(scale.high, "≥")}${unit}`)), diverging ? make("span", {class: "entry"}, make("i", {class: "swatch n4"}), "dotted: below 0") : "", none];
  }

  function listen(state) {
    const {strip} = state;
    strip.addEventListener("click", (event) => event.target.i !== undefined && choose(state, event.target.i, false));
    strip.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const next = target(state, event.key);
      if (next === undefined) return;
      event.preventDefault();
      choose(state, next, true);
    });
  }

  // Where a key leads: left and right token by token, up and down by line, Home and End to the first and last sampled one.
  function target(state, key) {
    const last = state.spans.length - 1;
    const first = Math.min(state.value.prompt, last);
    const at = state.chosen;
    if (key === "Home") return homeFrom(at, first);
    if (key === "End") return last;
    if (key === "Escape") return -1;
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(key)) return undefined;
    if (at < 0) return first;
    if (key === "ArrowLeft") return Math.max(0, at - 1);
    if (key === "ArrowRight") return Math.min(last, at + 1);
    return byLine(state.spans, at, key === "ArrowDown" ? 1 : -1);
  }

  // The first sampled token; from there, or before it, the very first.
  const homeFrom = (at, first) => (at >= 0 && at <= first ? 0 : first);

  function byLine(spans, at, side) {
    const from = spans[at].getBoundingClientRect();
    let best = at;
    let line = null;
    let least = Infinity;
    for (let index = at + side; spans[index]; index += side) {
      const box = spans[index].getClientRects()[0] || spans[index].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < 3) continue;
      if (line === null) line = box.top;
      if (Math.abs(box.top - line) > 3) break;
      const far = Math.abs(box.left - from.left);
      if (far < least) [best, least] = [index, far];
    }
    return best;
  }

  function choose(state, index, moved) {
    const old = state.spans[state.chosen];
    if (old) {
      old.classList.remove("chosen");
      old.removeAttribute("id");
      old.removeAttribute("role");
    }
    state.chosen = index;
    state.context.remember(state.key, index);
    const span = state.spans[index];
    if (span) {
      span.classList.add("chosen");
      span.id = "chosen-token";
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "true");
      state.strip.setAttribute("aria-activedescendant", "chosen-token");
      if (moved) span.scrollIntoView({block: "nearest"});
    } else state.strip.removeAttribute("aria-activedescendant");
    explain(state);
  }

  function explain(state) {
    const {make, number} = lightning;
    const {value, chosen, detail} = state;
    if (chosen < 0) {
      detail.replaceChildren(make("p", {class: "muted"}, "Choose a token: a click, or the arrow keys in the strip. Its values and why it was pushed stand here."));
      return;
    }
    const given = chosen < value.prompt;
    const where = given ? `given, token ${number(chosen + 1 + value.prompt_left_out)} of the prompt` : `sampled, token ${number(chosen - value.prompt + 1)} of ${number(value.texts.length - value.prompt)}`;
    const values = value.measures.map((measure) => make("tr", {}, make("th", {scope: "row"}, lightning.hint(make("span", {}, measure.name), measure.hint)),
      make("td", {}, measure.values[chosen] === null || measure.values[chosen] === undefined ? "–" : `${number(measure.values[chosen], 5)}${measure.unit ? ` ${measure.unit}` : ""}`)));
    const reasons = value.why;
    detail.replaceChildren(make("p", {class: "token"}, make("code", {}, JSON.stringify(value.texts[chosen]))), make("p", {class: "where"}, where),
      make("table", {class: "values"}, make("tbody", {}, values)),
      ...(given ? [make("p", {class: "muted"}, "It was given, not sampled: training does not push it.")] : reasonsOf(reasons)));
  }

  function reasonsOf(reasons) {
    const {make} = lightning;
    if (!reasons.length) return [make("p", {class: "muted"}, "Nothing was trained on it.")];
    const marks = {true: ["✓", "proved"], false: ["○", "not proved by audit"], null: ["–", "not derived"]};
    return [make("h3", {}, "Why this token was pushed"), make("ol", {class: "reasons"}, reasons.map((reason) => {
      const [sign, words] = marks[String(reason.proved)];
      return make("li", {}, make("div", {class: "line"}, lightning.hint(make("span", {class: "name"}, reason.name), reason.hint), make("b", {}, reason.value)),
        make("div", {class: "source"}, reason.source ? `${reason.source} · ` : "", make("span", {class: `proof ${reason.proved === true ? "good" : ""}`}, `${sign} ${words}`)));
    }))];
  }
})();

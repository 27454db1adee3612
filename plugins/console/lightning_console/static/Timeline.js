// What ran when: lanes, spans as bars, moments as diamonds. Arrow keys go from one to the next.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";
  const KINDS = {agent: "agent", call: "model call", tool: "tool", reward: "reward", state: "state"};
  const ORDER = ["agent", "call", "tool", "state", "reward"]; // what contains others lies below them

  lightning.components.Timeline = (element, value, context) => {
    const {make} = lightning;
    if (!value.spans.length) return element.append(lightning.empty("nothing was recorded of what ran when"));
    const order = [...value.spans].sort((a, b) => a.begin - b.begin || a.lane - b.lane || ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind));
    const seconds = Math.max(value.seconds, ...value.spans.map((span) => span.end)) || 1;
    const items = order.map((span) => itemOf(span, seconds, context));
    const detail = make("p", {class: "detail", "aria-live": "polite"});
    const key = `Timeline ${context.key}`;
    const show = (index) => {
      context.remember(key, index);
      items.forEach((item, at) => item.classList.toggle("chosen", at === index));
      tell(detail, order[index]);
    };
    const selected = order.findIndex((span) => span.selected);
    const start = selected >= 0 ? selected : context.remember(key) || 0;
    const chart = make("div", {class: "lanes", style: `--least: ${Math.min(4000, 40 * densest(value))}px`},
      value.lanes.map((lane, index) => laneOf(lane, order, items, index)), axisOf(seconds));
    element.append(legend(value), make("div", {class: "scroller", "data-scrolls": true}, chart), detail);
    lightning.rove(chart, items, start, (pressed, at) => lightning.nextSpan(order, at, pressed), show);
    chart.addEventListener("pointerover", (event) => {
      const at = items.indexOf(event.target.closest(".span"));
      if (at >= 0) tell(detail, order[at]);
    });
    chart.addEventListener("pointerleave", () => tell(detail, order[items.findIndex((item) => item.classList.contains("chosen"))]));
    if (selected >= 0) show(selected);
    else tell(detail, null);
  };

  function densest(value) {
    const counts = value.lanes.map((_, lane) => value.spans.filter((span) => span.lane === lane).length);
    return Math.max(...counts, 1);
  }

  function itemOf(span, seconds, context) {
    const {link, make} = lightning;
    const moment = span.end <= span.begin;
    const place = moment ? `left: ${(100 * span.begin) / seconds}%` : `left: ${(100 * span.begin) / seconds}%; width: ${(100 * (span.end - span.begin)) / seconds}%`;
    const item = link(context, span.to, {class: `span ${span.kind} ${moment ? "moment" : ""} ${span.tone} ${span.selected ? "selected" : ""}`,
      style: place, "aria-label": said(span), "aria-current": span.selected ? "true" : null}, make("span", {class: "name"}, moment || span.kind === "agent" ? "" : span.name));
    if (item.tagName !== "A") item.setAttribute("role", "img");
    return item;
  }

  function laneOf(name, order, items, index) {
    const {make} = lightning;
    const inside = ORDER.flatMap((kind) => items.filter((_, at) => order[at].lane === index && order[at].kind === kind));
    return make("div", {class: "lane", role: "group", "aria-label": name}, make("div", {class: "who"}, name), make("div", {class: "track"}, inside));
  }

  function axisOf(seconds) {
    const {make} = lightning;
    return make("div", {class: "lane axis", "aria-hidden": "true"}, make("div", {class: "who"}, "seconds"), make("div", {class: "track"},
      lightning.ticks(0, seconds, 6).filter((tick) => tick <= seconds * 0.97 || tick === seconds).map((tick) => make("span", {class: "tick", style: `left: ${(100 * tick) / seconds}%`}, lightning.number(tick)))));
  }

  function legend(value) {
    const {make} = lightning;
    const kinds = ORDER.filter((kind) => value.spans.some((span) => span.kind === kind));
    return make("div", {class: "legend"}, kinds.map((kind) => make("span", {class: "entry"}, make("i", {class: `swatch ${kind}`}), KINDS[kind])));
  }

  function said(span) {
    const when = span.end > span.begin
      ? `${lightning.number(span.begin)} to ${lightning.number(span.end)} s (${lightning.number(Number((span.end - span.begin).toPrecision(3)))} s)`
      : `at ${lightning.number(span.begin)} s`;
    return `${span.kind === "call" ? span.name : `${KINDS[span.kind]} ${span.name}`}, ${when}${span.tone === "bad" ? ", failed" : ""}${span.hint ? `: ${span.hint}` : ""}`;
  }

  function tell(detail, span) {
    detail.textContent = span ? said(span) : "Point at a span, or go through them with the arrow keys; Enter opens one.";
    detail.classList.toggle("muted", !span);
  }

  // Left and right: in time; up and down: what was at that time in the lane above or below. `spans` are in order of time.
  lightning.nextSpan = (spans, at, key) => {
    if (key === "Home") return 0;
    if (key === "End") return spans.length - 1;
    if (key === "ArrowLeft") return Math.max(0, at - 1);
    if (key === "ArrowRight") return Math.min(spans.length - 1, at + 1);
    if (key !== "ArrowUp" && key !== "ArrowDown") return undefined;
    const down = key === "ArrowDown";
    const lanes = [...new Set(spans.map((span) => span.lane))].filter((lane) => (down ? lane > spans[at].lane : lane < spans[at].lane)).sort((a, b) => (down ? a - b : b - a));
    if (!lanes.length) return at;
    const far = (span) => Math.max(0, span.begin - spans[at].end, spans[at].begin - span.end) + Math.abs(span.begin - spans[at].begin) * 1e-6;
    return spans.map((span, index) => ({span, index})).filter(({span}) => span.lane === lanes[0]).sort((a, b) => far(a.span) - far(b.span))[0].index;
  };
})();

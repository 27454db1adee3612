// Figures side by side.
window.lightning = window.lightning || {components: {}};
lightning.components.Facts = (element, value, context) => {
  "use strict";
  const {make, link, sign, hint} = lightning;
  if (!value.facts.length) return element.append(lightning.empty("no figures yet"));
  element.append(make("dl", {style: `--count: ${Math.max(4, value.facts.length)}`}, value.facts.map((fact) => make("div", {class: "fact"},
    make("dt", {}, hint(make("span", {}, fact.name), fact.hint)),
    make("dd", {class: `figure ${fact.tone}`.trim()}, sign(fact.tone), fact.to ? link(context, fact.to, {"data-key": `to ${fact.to}`}, fact.value) : fact.value),
    fact.detail ? make("dd", {class: "detail"}, fact.detail) : null))));
};

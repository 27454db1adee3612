// Figures side by side.
window.lightning = window.lightning || {components: {}};
lightning.components.Facts = (element, value, context) => {
  "use strict";
  const {make, link, sign, hint} = lightning;
  if (!value.facts.length) return element.append(lightning.empty("no figures yet"));
  const left = (columns) => (columns - (value.facts.length % columns)) % columns;
  const columns = [6, 5, 4].reduce((best, one) => (left(one) < left(best) ? one : best)); // those that leave fewest places empty
  element.append(make("dl", {style: `--count: ${columns}`}, value.facts.map((fact) => make("div", {class: "fact"},
    make("dt", {}, hint(make("span", {}, fact.name), fact.hint)),
    make("dd", {class: `figure ${fact.value.length > 12 ? "long" : ""} ${fact.tone}`}, sign(fact.tone), fact.to ? link(context, fact.to, {"data-key": `to ${fact.to}`}, lightning.breaking(fact.value)) : lightning.breaking(fact.value)),
    fact.detail ? make("dd", {class: "detail"}, fact.detail) : null))));
};

// Alarms, advice, plain words: what it is, why, where to look and what to type.
window.lightning = window.lightning || {components: {}};
lightning.components.Notices = (element, value, context) => {
  "use strict";
  const {make, link, sign} = lightning;
  if (!value.notices.length) return value.empty ? element.append(lightning.empty(value.empty)) : undefined;
  element.append(make("ul", {class: "notices"}, value.notices.map((notice) => make("li", {class: `notice ${notice.tone}`.trim()},
    make("div", {class: "gutter"}, sign(notice.tone)),
    make("div", {class: "what"},
      make("p", {class: "text"}, notice.text),
      !notice.detail ? null : notice.folded
        ? make("details", {}, make("summary", {}, "How this is known"), make("p", {class: "detail"}, notice.detail))
        : make("p", {class: "detail"}, notice.detail),
      notice.links.length ? make("p", {class: "links"}, notice.links.map((to) => link(context, to.to, {"data-key": `to ${to.to}`}, to.text))) : null,
      notice.commands.map((command) => lightning.copyable(command)))))));
};

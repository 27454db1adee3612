// Filters: what is chosen is an option of the address, so that a page can be sent to somebody.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";

  lightning.components.Controls = (element, value, context) => {
    const choose = (name, chosen) => context.open(lightning.having(value.address, {[name]: chosen}));
    element.append(lightning.make("form", {class: "controls", role: "search", submit: (event) => event.preventDefault()},
      value.controls.map((control) => (control.choices.length ? choice(control, choose) : text(control, choose)))));
  };

  function text(control, choose) {
    const {make} = lightning;
    const input = make("input", {type: "search", name: control.name, value: control.value, autocomplete: "off", spellcheck: "false",
      "data-key": `control ${control.name}`, change: () => input.value !== control.value && choose(control.name, input.value)});
    return make("label", {class: "control"}, make("span", {class: "name"}, control.label), input);
  }

  function choice(control, choose) {
    const {make} = lightning;
    const letters = control.choices.reduce((sum, [, label]) => sum + label.length, 0);
    if (control.choices.length > 4 || letters > 40) {
      const select = make("select", {name: control.name, "data-key": `control ${control.name}`, change: () => choose(control.name, select.value)},
        control.choices.map(([value, label]) => make("option", {value, selected: value === control.value}, label)));
      return make("label", {class: "control"}, make("span", {class: "name"}, control.label), select);
    }
    return make("div", {class: "control", role: "group", "aria-label": control.label}, make("span", {class: "name"}, control.label),
      make("div", {class: "segments"}, control.choices.map(([value, label]) => make("button", {type: "button",
        "data-key": `control ${control.name} ${value}`, "aria-pressed": String(value === control.value),
        click: () => value !== control.value && choose(control.name, value)}, label))));
  }
})();

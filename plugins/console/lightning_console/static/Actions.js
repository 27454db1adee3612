// Buttons that change something: asked again in place, then what came of it.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";

  lightning.components.Actions = (element, value, context) => {
    const {make} = lightning;
    if (!context.act || !value.actions.length) {
      (element.closest("section") || element).hidden = true;
      return;
    }
    element.append(make("div", {class: "actions"}, value.actions.map((action) => one(action, context))));
  };

  function one(action, context) {
    const {make} = lightning;
    const said = make("p", {class: "said"});
    const button = make("button", {type: "button", "data-key": `act ${action.name} ${action.label}`, click: () => (ask ? open(true) : act())}, action.label);
    const ask = action.ask || action.fields.length ? asking(action, (given) => act(given), () => open(false)) : null;
    const open = (wanted) => {
      ask.hidden = !wanted;
      button.hidden = wanted;
      (wanted ? ask.querySelector("input, button") : button).focus();
    };
    const act = async (given = {}) => {
      if (ask) open(false);
      button.disabled = true;
      said.className = "said";
      said.setAttribute("role", "status");
      said.textContent = "…";
      try {
        const result = await context.act(action.name, {...action.arguments, ...given});
        said.textContent = result === undefined || result === null ? "done" : typeof result === "string" ? result : JSON.stringify(result);
        said.classList.add("good");
        said.prepend(lightning.sign("good"), " ");
      } catch (error) {
        said.setAttribute("role", "alert");
        said.textContent = String((error && error.message) || error);
        said.classList.add("bad");
        said.prepend(lightning.sign("bad"), " ");
      }
      button.disabled = false;
    };
    return make("div", {class: "action"}, button, ask, said);
  }

  function asking(action, act, close) {
    const {make} = lightning;
    const inputs = action.fields.map(([name]) => make("input", {name, type: "text", autocomplete: "off", "data-key": `field ${action.name} ${name}`}));
    const given = () => Object.fromEntries(inputs.map((input) => [input.name, input.value]));
    return make("form", {class: "asking", hidden: true, "aria-label": action.label,
      submit: (event) => { event.preventDefault(); act(given()); },
      keydown: (event) => { if (event.key === "Escape") close(); }},
      action.ask ? make("p", {}, action.ask) : null,
      action.fields.map(([, label], index) => make("label", {class: "control"}, make("span", {class: "name"}, label), inputs[index])),
      make("div", {class: "choices"}, make("button", {class: "strong"}, action.label), make("button", {type: "button", click: close}, "Cancel")));
  }
})();

// Rows of cells: numbers to the right, a curve where a cell has one, marks that go into the address.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";

  lightning.components.Table = (element, value, context) => {
    const {make, link, empty} = lightning;
    if (!value.rows.length) return element.append(empty(value.empty), pages(value, context));
    const choosing = value.select && value.keys.length === value.rows.length;
    const head = value.columns.map((column) => headOf(column, context));
    if (choosing) head.unshift(make("th", {class: "mark", scope: "col"}, make("span", {class: "unseen"}, "marked")));
    const rows = value.rows.map((cells, index) => {
      const drawn = cells.map((cell, at) => cellOf(cell, value.columns[at] || {kind: "text"}, context));
      if (choosing) drawn.unshift(mark(value, index, context));
      const to = (cells.find((cell) => cell.to) || {to: ""}).to;
      const marked = choosing && value.selected.includes(value.keys[index]);
      return make("tr", {class: [to && context.link(to) ? "opens" : "", marked ? "marked" : ""].join(" ").trim() || null,
        click: (event) => rowClicked(event, to, context)}, drawn);
    });
    element.append(
      make("div", {class: "scroller", "data-scrolls": true, tabindex: "0", role: "region", "aria-label": context.title || "table"},
        make("table", {class: choosing ? "choosing" : null}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows))),
      pages(value, context));
  };

  function headOf(column, context) {
    const {make, link, hint} = lightning;
    const name = column.sort ? link(context, column.sort, {"data-key": `sort ${column.name}`}, column.name) : make("span", {}, column.name);
    return make("th", {scope: "col", class: column.kind}, hint(name, column.hint));
  }

  function cellOf(cell, column, context) {
    const {make, link, sign, hint} = lightning;
    const inside = cell.to ? link(context, cell.to, {"data-key": `to ${cell.to}`}, lightning.breaking(cell.text)) : make("span", {}, lightning.breaking(cell.text));
    const spark = cell.spark && cell.spark.length ? lightning.spark(cell.spark) : null;
    return make("td", {class: `${column.kind} ${cell.text.length <= 18 ? "short" : ""} ${cell.tone}`}, sign(cell.tone), hint(inside, cell.hint), spark);
  }

  function mark(value, index, context) {
    const {make} = lightning;
    const key = value.keys[index];
    const box = make("input", {type: "checkbox", "data-key": `mark ${key}`, "aria-label": `mark ${value.rows[index][0].text || key}`,
      change: () => {
        const marked = new Set(value.selected);
        if (box.checked) marked.add(key);
        else marked.delete(key);
        context.open(lightning.having(context.address, {[value.select]: [...marked].join(",")}));
      }});
    box.checked = value.selected.includes(key);
    return make("td", {class: "mark"}, make("label", {}, box));
  }

  // A click anywhere on a row opens what the row is about, unless it was meant for something in it.
  function rowClicked(event, to, context) {
    if (!to || event.defaultPrevented || event.target.closest("a, input, button, label, [data-hint]") || String(getSelection())) return;
    if (context.link(to)) context.open(to);
  }

  function pages(value, context) {
    const {make, link} = lightning;
    if (!value.pages.length) return "";
    return make("nav", {class: "pages", "aria-label": "more rows"}, value.pages.map((page) => link(context, page.to, {"data-key": `page ${page.text}`}, page.text)));
  }

  // A curve of a cell's size, gaps where a value is missing; its last value is a dot.
  lightning.spark = (values) => {
    const {svg} = lightning;
    const known = values.filter((one) => one !== null);
    const low = Math.min(...known);
    const high = Math.max(...known);
    const x = (index) => 2 + (index * 76) / Math.max(1, values.length - 1);
    const y = (one) => (high > low ? 17 - (14 * (one - low)) / (high - low) : 10);
    let path = "";
    values.forEach((one, index) => {
      if (one !== null) path += `${index && values[index - 1] !== null ? "L" : "M"}${x(index).toFixed(1)} ${y(one).toFixed(1)}`;
    });
    const last = values.findLastIndex((one) => one !== null);
    return svg("svg", {class: "spark", width: 80, height: 20, viewBox: "0 0 80 20", role: "img",
      "aria-label": known.length ? `from ${lightning.number(known[0])} to ${lightning.number(known[known.length - 1])}` : "no values"},
      svg("path", {d: path}), last >= 0 ? svg("circle", {cx: x(last), cy: y(values[last]), r: 2}) : null);
  };
})();

// Sibling rollouts as one tree of calls, left to right: a node is filled by its value, an edge is as wide as its visits and coloured by its advantage.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";
  const COLUMN = 300; // pixels from a node to the next
  const ROW = 46;
  const LINK = 22; // height of a rollout's link
  const NODE = 84;
  const MOST = 64; // rollouts whose ends are listed

  lightning.components.GroupTree = (element, value, context) => {
    const {make, svg} = lightning;
    if (!value.nodes.length) return element.append(lightning.empty("no call of this group was recorded"));
    const layout = lightning.treeLayout(value.nodes, ROW, LINK);
    const children = childrenOf(value.nodes);
    const widest = Math.max(1, ...value.nodes.map((node) => node.visits));
    const strongest = Math.max(...value.nodes.map((node) => Math.abs(node.advantage || 0))) || 1;
    const left = (depth) => 8 + depth * COLUMN;
    const items = value.nodes.map((node, index) => nodeOf(node, children[index], value, layout.places[index], left, context));
    const edges = value.nodes.map((node, index) => edgeOf(node, layout, index, left, widest, strongest));
    const agents = new Set(value.nodes.filter((node) => node.parent >= 0 && node.caller).map((node) => node.caller)).size > 1;
    const labels = value.nodes.map((node, index) => labelOf(node, layout, index, left, strongest, agents, context));
    const ends = layout.ends.map((end) => endOf(end, value.nodes[end.node], left, context));
    const size = {width: left(layout.depth + 1) + 12, height: layout.height + 16};
    const detail = make("div", {class: "chosen", "aria-live": "polite"});
    const key = `GroupTree ${context.key}`;
    const board = make("div", {class: "board", style: `width: ${size.width}px; height: ${size.height}px`},
      svg("svg", {...size, "aria-hidden": "true"}, edges, layout.ends.map((end) => twig(end, layout, left))), labels, items, ends);
    const scroller = make("div", {class: "scroller", "data-scrolls": true}, board);
    element.append(legend(value, strongest, widest), scroller, detail);
    scroller.scrollTop = layout.places[0].y - scroller.clientHeight / 2; // a high tree is seen from its root
    const show = (index) => {
      context.remember(key, index);
      items.forEach((item, at) => item.classList.toggle("at", at === index));
      tell(detail, value.nodes[index], children[index], context);
    };
    const start = Math.min(context.remember(key) || 0, items.length - 1);
    lightning.rove(board, items, start, (pressed, at) => lightning.nextNode(value.nodes, layout, at, pressed), show);
    board.addEventListener("pointerover", (event) => {
      const at = event.target.closest("[data-node]");
      if (at) tell(detail, value.nodes[Number(at.getAttribute("data-node"))], children[Number(at.getAttribute("data-node"))], context);
    });
    tell(detail, value.nodes[start], children[start], context);
  };

  function childrenOf(nodes) {
    const children = nodes.map(() => []);
    nodes.forEach((node, index) => node.parent >= 0 && children[node.parent].push(index));
    return children;
  }

  // Where each node is: {places: [{depth, y}], ends: [{node, depth, y}] where rollouts end, height, depth of the deepest}; y in pixels from the top.
  lightning.treeLayout = (nodes, row, link) => {
    const children = childrenOf(nodes);
    const places = nodes.map(() => ({depth: 0, y: 0}));
    const ends = [];
    let height = 0;
    let deepest = 0;
    const visit = (index, depth) => {
      const below = children[index].map((child) => visit(child, depth + 1));
      const count = nodes[index].rollouts.length;
      if (count) {
        const room = Math.max(row, count * link + 10);
        below.push(height + room / 2);
        ends.push({node: index, depth: depth + 1, y: height + room / 2, count});
        height += room;
      } else if (!below.length) {
        below.push(height + row / 2);
        height += row;
      }
      deepest = Math.max(deepest, depth + (count ? 1 : 0));
      places[index] = {depth, y: (below[0] + below[below.length - 1]) / 2};
      return places[index].y;
    };
    nodes.forEach((node, index) => node.parent < 0 && visit(index, 0));
    return {places, ends, height, depth: deepest, children, branches: nodes.map((node) => node.branch)};
  };

  function nodeOf(node, children, value, place, left, context) {
    const {make, link, short} = lightning;
    const split = children.length > 1 && node.compare;
    const share = node.value === null ? null : Math.max(0, Math.min(1, (node.value - value.low) / (value.high - value.low || 1)));
    const item = link(context, split ? node.compare : node.to, {class: `node ${split ? "split" : ""} ${share === null ? "unknown" : ""}`,
      style: `left: ${left(place.depth)}px; top: ${place.y + 8 - 14}px; --share: ${share === null ? 0 : Math.round(share * 100)}%`,
      "aria-label": `${node.caller} value ${short(node.value)}, ${node.visits} rollouts${node.branch ? `, ${node.branch}` : ""}${split ? ", they part here: compare" : ""}`},
      make("b", {}, short(node.value)), split ? fork() : null, make("small", {}, `×${node.visits}`));
    return item;
  }

  const plus = (value) => (value > 0 ? "+" : "") + lightning.short(value);
  const fork = () => lightning.svg("svg", {class: "fork", width: 11, height: 11, viewBox: "0 0 11 11", "aria-hidden": "true"},
    lightning.svg("path", {d: "M0 5.5H4Q6 5.5 6 3.5V2H11M4 5.5Q6 5.5 6 7.5V9H11"}));

  const strength = (advantage, strongest) => lightning.bin(advantage, strongest);

  function edgeOf(node, layout, index, left, widest, strongest) {
    if (node.parent < 0) return "";
    const [from, to] = [layout.places[node.parent], layout.places[index]];
    const x = left(from.depth) + NODE;
    const [y0, y1] = [from.y + 8, to.y + 8];
    const width = 1.5 + (12 * node.visits) / widest;
    return lightning.svg("path", {class: `edge ${node.branch ? "branch" : ""} ${node.advantage === null ? "none" : strength(node.advantage, strongest)}`, "stroke-width": width.toFixed(1),
      d: `M${x} ${y0}C${x + 24} ${y0} ${x + 14} ${y1} ${x + 44} ${y1}H${left(to.depth)}`});
  }

  // What was answered; before it who answered, where several agents do, and what a branch changes where it begins.
  function labelOf(node, layout, index, left, strongest, agents, context) {
    if (node.parent < 0) return "";
    const {make, link} = lightning;
    const place = layout.places[index];
    const begins = node.branch && layout.branches[node.parent] !== node.branch;
    return link(context, node.to, {class: "action", tabindex: "-1", "data-node": String(index),
      style: `left: ${left(place.depth) - COLUMN + NODE + 36}px; width: ${COLUMN - NODE - 42}px; top: ${place.y + 8 - 24}px`},
      begins ? make("b", {class: "branch"}, node.branch) : null, agents && node.caller ? make("span", {class: "who"}, node.caller) : null,
      make("span", {class: "text"}, node.label || node.action || "(no text)"), node.advantage === null ? null : make("b", {class: `advantage ${strength(node.advantage, strongest)}`}, plus(node.advantage)));
  }

  // The rollouts that end at a node, in the column after it.
  function endOf(end, node, left, context) {
    const {make, link} = lightning;
    return make("ul", {class: "ends", style: `left: ${left(end.depth) - COLUMN + NODE + 30}px; top: ${end.y + 8 - (Math.min(end.count, MOST) * LINK) / 2}px`},
      node.rollouts.slice(0, MOST).map((rollout) => make("li", {}, link(context, rollout.to, {"data-key": `end ${rollout.to}`}, rollout.text))));
  }

  function twig(end, layout, left) {
    const from = layout.places[end.node];
    const x = left(from.depth) + NODE;
    return lightning.svg("path", {class: "twig", d: `M${x} ${from.y + 8}C${x + 14} ${from.y + 8} ${x + 8} ${end.y + 8} ${x + 24} ${end.y + 8}`});
  }

  function legend(value, strongest, widest) {
    const {make, short} = lightning;
    const trained = value.nodes.some((node) => node.advantage !== null);
    return make("div", {class: "legend"},
      make("span", {class: "entry"}, "box: mean return", make("span", {class: "end"}, short(value.low)), make("i", {class: "ramp value"}), make("span", {class: "end"}, short(value.high))),
      trained ? make("span", {class: "entry"}, "line: advantage", make("span", {class: "end"}, plus(-strongest)), make("i", {class: "ramp diverging"}), make("span", {class: "end"}, plus(strongest)))
        : make("span", {class: "entry"}, "no advantage: nothing was trained on these calls"),
      make("span", {class: "entry"}, `line's width: rollouts, up to ${widest}`), make("span", {class: "entry"}, fork(), "rollouts part here: click to compare"),
      value.nodes.some((node) => node.branch) ? make("span", {class: "entry"}, make("i", {class: "dashes"}), "branches only") : null);
  }

  function tell(detail, node, children, context) {
    const {make, link, short} = lightning;
    const split = children.length > 1 && node.compare;
    const trained = node.parent < 0 ? "" : node.advantage === null ? ", not trained" : `, advantage ${plus(node.advantage)}`;
    const tools = (node.tools || []).map(([name, result]) => make("p", {class: "tool"}, make("b", {}, name), " gave: ", result));
    const branched = `${node.branch ? ` · ${node.branch}` : ""}${node.branches ? ` · ${node.branches} ${node.branches === 1 ? "branch begins" : "branches begin"} behind it` : ""}`;
    detail.replaceChildren(
      make("p", {}, make("b", {}, node.caller || (node.parent < 0 ? "beginning" : "call")), ` · mean return ${short(node.value)} · ${node.visits} rollouts${trained}${branched}`,
        node.to ? " · " : null, node.to ? link(context, node.to, {}, "open this call") : null, split ? " · " : null, split ? link(context, node.compare, {}, `compare the ${children.length} continuations`) : null),
      node.parent < 0 ? "" : make("p", {class: "action"}, node.action || "(no text)"), ...tools);
  }

  // Left: the node before; right: the first after; up and down: the next one in the same column.
  lightning.nextNode = (nodes, layout, at, key) => {
    if (key === "Home") return nodes.findIndex((node) => node.parent < 0);
    if (key === "End") return nodes.length - 1;
    if (key === "ArrowLeft") return nodes[at].parent < 0 ? at : nodes[at].parent;
    if (key === "ArrowRight") return layout.children[at][0] ?? at;
    if (key !== "ArrowUp" && key !== "ArrowDown") return undefined;
    const {depth, y} = layout.places[at];
    const side = key === "ArrowDown" ? 1 : -1;
    const others = layout.places.map((place, index) => ({...place, index})).filter((place) => place.depth === depth && (place.y - y) * side > 0);
    return others.length ? others.sort((a, b) => (a.y - b.y) * side)[0].index : at;
  };
})();

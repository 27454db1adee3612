// Curves, points or bars over a common axis, with intervals, marks and a readout of the nearest point.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";
  const MOST = 2000; // points of a series that are drawn
  const COLOURS = 8;
  const SHAPES = ["circle", "square", "triangle", "diamond", "cross"];

  lightning.components.Chart = (element, value, context) => {
    const {make} = lightning;
    const series = value.series.map((one, index) => prepare(one, index, value.kind)).filter((one) => one.points.length);
    if (!series.length) return element.append(lightning.empty(value.empty));
    const hidden = new Set(context.remember(`Chart ${context.title} hidden`) || []);
    const place = make("div", {class: "plot"});
    const state = {value, context, series, hidden, place, width: 0};
    const redraw = () => {
      state.width = place.clientWidth || 600;
      draw(state);
    };
    element.append(legend(state, redraw), place, left(series, value.kind));
    redraw();
    new ResizeObserver(() => Math.abs((place.clientWidth || state.width) - state.width) > 1 && redraw()).observe(place);
  };

  // What is drawn of a series: its points that have a place, thinned, with their addresses and hints.
  function prepare(series, index, kind) {
    const all = series.points.map((point, at) => ({
      x: point[0], y: point[1], low: point.length > 3 ? point[2] : null, high: point.length > 3 ? point[3] : null,
      to: series.to[at] || "", hint: series.hints[at] || ""}));
    const points = lightning.thin(all, kind === "scatter" ? "scatter" : "line", MOST);
    return {name: series.name, index, points, total: all.length, tone: series.tone, dashed: series.dashed, shape: SHAPES[index % SHAPES.length],
      class: `series c${index % COLOURS} ${series.tone}${series.dashed ? " dashed" : ""}`};
  }

  // At most about `most` points: of each stretch its lowest and its highest, and where a curve is interrupted; of a cloud one for each place.
  lightning.thin = (points, kind, most) => {
    if (points.length <= most) return points;
    if (kind === "scatter") return sparse(points, most);
    const size = Math.ceil(points.length / (most / 4));
    const kept = [];
    for (let from = 0; from < points.length; from += size) {
      const to = Math.min(points.length, from + size);
      const chosen = new Set([from, to - 1]);
      let low = -1;
      let high = -1;
      for (let at = from; at < to; at++) {
        if (points[at].y === null) {
          if (at === from || points[at - 1].y !== null) chosen.add(at);
        } else {
          if (low < 0 || points[at].y < points[low].y) low = at;
          if (high < 0 || points[at].y > points[high].y) high = at;
        }
      }
      if (low >= 0) chosen.add(low).add(high);
      kept.push(...[...chosen].sort((a, b) => a - b).map((at) => points[at]));
    }
    return kept;
  };

  function sparse(points, most) {
    const known = points.filter((point) => point.x !== null && point.y !== null);
    const [left, right] = range(known.map((point) => point.x));
    const [low, high] = range(known.map((point) => point.y));
    for (let cells = Math.ceil(Math.sqrt(most) * 4); ; cells = Math.floor(cells / 1.5)) {
      const seen = new Map();
      for (const point of known) {
        const cell = `${Math.round(((point.x - left) / (right - left || 1)) * cells)} ${Math.round(((point.y - low) / (high - low || 1)) * cells)}`;
        if (!seen.has(cell)) seen.set(cell, point);
      }
      if (seen.size <= most || cells < 4) return [...seen.values()];
    }
  }

  function range(values) {
    let low = Infinity;
    let high = -Infinity;
    for (const value of values) {
      if (value === null || value === undefined || !Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return [low, high];
  }

  function legend(state, redraw) {
    const {make} = lightning;
    if (state.series.length < 2 && (state.value.small || state.series[0].name === state.value.y || !state.series[0].name)) return "";
    return make("div", {class: "legend"}, state.series.map((one) => {
      const button = make("button", {type: "button", class: one.class, "data-key": `series ${one.name}`, "aria-pressed": String(!state.hidden.has(one.name)),
        "aria-label": `${one.name}: show or hide`,
        click: () => {
          if (!state.hidden.delete(one.name)) state.hidden.add(one.name);
          state.context.remember(`Chart ${state.context.title} hidden`, [...state.hidden]);
          button.setAttribute("aria-pressed", String(!state.hidden.has(one.name)));
          redraw();
        }}, sample(one, state.value.kind), make("span", {}, one.name));
      return button;
    }));
  }

  function sample(one, kind) {
    const {svg} = lightning;
    return svg("svg", {width: 22, height: 12, "aria-hidden": "true"},
      kind === "bar" ? svg("rect", {class: "bar", x: 4, y: 1, width: 14, height: 10}) : [
        kind === "line" ? svg("path", {class: "line", d: "M1 6H21"}) : null, shape(one.shape, 11, 6, 3.4)]);
  }

  function shape(name, x, y, r) {
    const d = {
      circle: `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`, square: `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
      triangle: `M${x} ${y - r * 1.2}l${r * 1.2} ${r * 2.2}h${-2.4 * r}Z`, diamond: `M${x} ${y - r * 1.3}l${r * 1.3} ${r * 1.3}l${-r * 1.3} ${r * 1.3}l${-r * 1.3} ${-r * 1.3}Z`,
      cross: `M${x - r} ${y - r}l${2 * r} ${2 * r}M${x + r} ${y - r}l${-2 * r} ${2 * r}`,
    }[name];
    return lightning.svg("path", {class: `dot ${name}`, d});
  }

  function left(series, kind) {
    const thinned = series.filter((one) => one.points.length < one.total);
    if (!thinned.length) return "";
    const drawn = thinned.reduce((sum, one) => sum + one.points.length, 0);
    const total = thinned.reduce((sum, one) => sum + one.total, 0);
    return lightning.make("p", {class: "note"}, `${lightning.number(drawn)} of ${lightning.number(total)} points are drawn: `
      + (kind === "scatter" ? "one where several lie together." : "of each stretch the lowest and the highest."));
  }

  function draw(state) {
    const {svg} = lightning;
    const {value, place} = state;
    state.visible = state.series.filter((one) => !state.hidden.has(one.name));
    scales(state);
    const {width, height} = state;
    const drawn = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "img", "data-key": "plot",
      class: `${value.kind} ${state.visible.length > 4 ? "many" : ""}`,
      "aria-label": describe(state)}, axes(state), marks(state),
      state.visible.map((one) => (value.kind === "bar" ? bars(state, one) : curve(state, one))));
    state.cursor = svg("g", {class: "cursor"});
    drawn.append(state.cursor);
    const had = place.contains(document.activeElement);
    state.readout = lightning.make("div", {class: "readout", hidden: true});
    state.live = lightning.make("div", {class: "unseen", "aria-live": "polite"});
    place.replaceChildren(drawn, state.readout, state.live);
    if (had) drawn.focus({preventScroll: true});
    listen(state, drawn);
  }

  function describe(state) {
    const {value} = state;
    return `${state.context.title || value.y}: ${state.visible.map((one) => {
      const last = one.points.findLast((point) => point.y !== null);
      return `${one.name} ${one.points.length} points${last ? `, last ${lightning.number(last.y)}` : ""}`;
    }).join("; ")}. Arrow keys read the points.`;
  }

  function scales(state) {
    const {value, visible} = state;
    const points = visible.flatMap((one) => one.points);
    const [left, right] = range([...points.map((point) => point.x), ...value.marks.map(([x]) => x)]);
    let [low, high] = range(points.flatMap((point) => [point.y, point.low, point.high]));
    if (value.kind === "bar") [low, high] = [Math.min(0, low), Math.max(0, high)];
    state.wholeY = points.every((point) => point.y === null || Number.isInteger(point.y));
    [low, high] = spread(low, high, value.bounds[0], value.bounds[1], value.kind === "bar");
    state.height = value.small ? 136 : 252;
    const wanted = value.small ? 3 : 5;
    state.ticksY = lightning.ticks(low, high, wanted, state.wholeY);
    state.labelsY = lightning.labels(state.ticksY);
    const letters = Math.max(...state.labelsY.map((label) => label.length), 2);
    state.box = {left: 14 + letters * 6.6, right: state.width - 12, top: value.small ? 24 : 28, bottom: state.height - (value.small ? 24 : 34)};
    state.slot = value.kind === "bar" ? slotOf(points) : 0;
    let [from, to] = [left - state.slot / 2, right + state.slot / 2];
    if (!(to > from)) [from, to] = [from - 0.5, to + 0.5];
    if (!Number.isFinite(from)) [from, to] = [0, 1];
    const inset = value.kind === "scatter" ? 8 : 4;
    const {box} = state;
    state.x = (at) => box.left + inset + ((at - from) / (to - from)) * (box.right - box.left - 2 * inset);
    state.y = (at) => box.bottom - ((at - low) / (high - low)) * (box.bottom - box.top);
    state.ticksX = lightning.ticks(Math.ceil(from * 1e9) / 1e9, to, Math.max(2, Math.min(9, (box.right - box.left) / 90)), value.whole)
      .filter((tick) => tick >= from && tick <= to);
  }

  // A vertical range with some air, which a given bound takes away.
  function spread(low, high, least, most, ground) {
    if (!Number.isFinite(low)) [low, high] = [0, 1];
    if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    const air = (high - low) * 0.06;
    const bottom = least ?? (ground && low === 0 ? 0 : low - air);
    const top = most ?? (ground && high === 0 ? 0 : high + air);
    return top > bottom ? [bottom, top] : [Math.min(low, bottom), Math.max(high, top) + (low === high ? 1 : 0)];
  }

  function slotOf(points) {
    const xs = [...new Set(points.map((point) => point.x))].sort((a, b) => a - b);
    let least = Infinity;
    for (let at = 1; at < xs.length; at++) least = Math.min(least, xs[at] - xs[at - 1]);
    return Number.isFinite(least) ? least : 1;
  }

  function axes(state) {
    const {svg} = lightning;
    const {box, value} = state;
    const lines = state.ticksY.map((tick, index) => svg("g", {class: tick === 0 ? "grid zero" : "grid"},
      svg("path", {d: `M${box.left} ${state.y(tick)}H${box.right}`}),
      svg("text", {x: box.left - 6, y: state.y(tick) + 4, "text-anchor": "end"}, state.labelsY[index])));
    const labels = lightning.labels(state.ticksX);
    const free = box.right - (value.small ? value.x.length * 6.5 + 18 : 0);
    const below = state.ticksX.map((tick, index) => state.x(tick) <= free && svg("text", {x: state.x(tick), y: box.bottom + 16,
      "text-anchor": state.x(tick) > box.right - 14 && index ? "end" : "middle"}, labels[index]));
    return svg("g", {class: "axes"}, lines, svg("path", {class: "ground", d: `M${box.left} ${box.bottom}H${box.right}`}), below,
      svg("text", {class: "name", x: 2, y: 12}, value.y),
      svg("text", {class: "name", x: box.right, y: value.small ? box.bottom + 16 : state.height - 3, "text-anchor": "end"}, value.x));
  }

  // Vertical lines with a text; one that has no room for its text is a hint.
  function marks(state) {
    const {svg} = lightning;
    const {box, value} = state;
    let free = -Infinity;
    return [...value.marks].sort((a, b) => a[0] - b[0]).map(([x, text]) => {
      const at = state.x(x);
      const width = text.length * 6.2 + 10;
      const flip = at + width > box.right && at - width > Math.max(free, box.left);
      const fits = !value.small && (flip ? at - width : at) > free && (flip || at + width <= box.right);
      if (fits) free = flip ? at + 4 : at + width;
      const group = svg("g", {class: "mark", "data-key": `mark ${x}`, "aria-label": text, role: "img"},
        svg("path", {d: `M${at} ${box.top - 4}V${box.bottom}`}), svg("path", {class: "flag", d: `M${at - 4} ${box.top - 8}h8l-4 6Z`}),
        fits ? svg("text", {x: at + (flip ? -7 : 7), y: box.top, "text-anchor": flip ? "end" : "start"}, text) : null);
      return fits ? group : lightning.hint(group, text);
    });
  }

  function curve(state, one) {
    const {svg} = lightning;
    const placed = one.points.filter((point) => point.x !== null && point.y !== null);
    const group = svg("g", {class: one.class});
    if (state.value.kind === "line") {
      stretches(one.points).forEach((points) => group.append(
        band(state, points), svg("path", {class: "line", d: points.map((point, at) => `${at ? "L" : "M"}${xy(state, point)}`).join("")})));
      const alone = stretches(one.points).filter((points) => points.length === 1).flat();
      const few = placed.length <= 40 && !state.value.small;
      (few ? placed : [...alone, ...placed.slice(-1)]).forEach((point) => group.append(shape(one.shape, state.x(point.x), state.y(point.y), state.value.small ? 2.2 : 3)));
    } else heaps(placed).forEach(([point, count]) => group.append(whisker(state, point), shape(one.shape, state.x(point.x), state.y(point.y), 3.4 * Math.min(2.5, Math.sqrt(count)))));
    return group;
  }

  // Points of the very same place are one larger one.
  function heaps(points) {
    const found = new Map();
    for (const point of points) {
      const place = `${point.x} ${point.y}`;
      if (found.has(place)) found.get(place)[1]++;
      else found.set(place, [point, 1]);
    }
    return [...found.values()];
  }

  const xy = (state, point) => `${state.x(point.x).toFixed(1)} ${state.y(point.y).toFixed(1)}`;

  // A curve's unbroken parts: where a value is missing there is a gap.
  function stretches(points) {
    const found = [[]];
    for (const point of points) {
      if (point.x === null || point.y === null) found.push([]);
      else found[found.length - 1].push(point);
    }
    return found.filter((stretch) => stretch.length);
  }

  function band(state, points) {
    const known = points.filter((point) => point.low !== null && point.high !== null);
    if (!known.length) return "";
    if (known.length === 1) return whisker(state, known[0]);
    const above = known.map((point, at) => `${at ? "L" : "M"}${state.x(point.x).toFixed(1)} ${state.y(point.high).toFixed(1)}`).join("");
    const below = known.toReversed().map((point) => `L${state.x(point.x).toFixed(1)} ${state.y(point.low).toFixed(1)}`).join("");
    return lightning.svg("path", {class: "band", d: `${above}${below}Z`});
  }

  function whisker(state, point) {
    if (point.low === null || point.high === null) return "";
    const [x, low, high] = [state.x(point.x), state.y(point.low), state.y(point.high)];
    return lightning.svg("path", {class: "whisker", d: `M${x - 3} ${high}h6M${x} ${high}V${low}M${x - 3} ${low}h6`});
  }

  function bars(state, one) {
    const {svg} = lightning;
    const slot = Math.max(2, (state.x(state.slot) - state.x(0)) * 0.86);
    const width = Math.max(1, slot / state.visible.length - (state.visible.length > 1 ? 1 : 0));
    const shift = state.visible.indexOf(one) * (slot / state.visible.length) - slot / 2;
    const ground = Math.min(state.box.bottom, state.y(0));
    return svg("g", {class: one.class}, one.points.filter((point) => point.y !== null).flatMap((point) => [
      svg("rect", {class: "bar", x: state.x(point.x) + shift, width, y: Math.min(state.y(point.y), ground), height: Math.max(point.y ? 1 : 0, Math.abs(state.y(point.y) - ground))}),
      whisker(state, point)]));
  }

  // The nearest point by pointer or arrow keys: what it is, and where a click leads.
  function listen(state, drawn) {
    const spots = state.visible.flatMap((one, row) => one.points.filter((point) => point.x !== null && point.y !== null)
      .map((point) => ({...point, one, row, px: state.x(point.x), py: state.y(point.y)})));
    if (!spots.length) return;
    let chosen = null;
    const choose = (spot, said) => {
      chosen = spot;
      read(state, spot, spots, drawn, said);
    };
    const at = (event) => {
      const box = drawn.getBoundingClientRect();
      choose(nearest(spots, event.clientX - box.left, event.clientY - box.top, state.value.kind === "scatter" ? 1 : 0.15), false);
    };
    drawn.addEventListener("pointermove", (event) => event.pointerType !== "touch" && at(event));
    const hide = () => { chosen = null; state.readout.hidden = true; state.cursor.replaceChildren(); };
    drawn.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && hide());
    drawn.addEventListener("blur", hide);
    const open = () => chosen && chosen.to && state.context.link(chosen.to) && state.context.open(chosen.to);
    let reads = false; // a finger's first touch of a point reads it, the second one opens it
    drawn.addEventListener("pointerdown", (event) => {
      const before = chosen;
      at(event);
      reads = event.pointerType === "touch" && chosen !== before;
    });
    drawn.addEventListener("click", () => reads || open());
    drawn.addEventListener("keydown", (event) => {
      if (event.key === "Enter") open();
      const next = step(spots, chosen, event.key);
      if (!next) return;
      event.preventDefault();
      choose(next, true);
    });
  }

  function nearest(spots, x, y, weight) {
    let best = null;
    let least = Infinity;
    for (const spot of spots) {
      const far = (spot.px - x) ** 2 + weight * (spot.py - y) ** 2;
      if (far < least) [best, least] = [spot, far];
    }
    return best;
  }

  function step(spots, from, key) {
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(key)) return null;
    if (!from) return key === "Home" ? spots[0] : spots[spots.length - 1];
    const row = spots.filter((spot) => spot.row === from.row);
    const at = row.findIndex((spot) => spot.x === from.x && spot.y === from.y);
    if (key === "Home" || key === "End") return row.at(key === "Home" ? 0 : -1);
    if (key === "ArrowLeft" || key === "ArrowRight") return row[at + (key === "ArrowRight" ? 1 : -1)] || from;
    const rows = [...new Set(spots.map((spot) => spot.row))];
    const other = rows[rows.indexOf(from.row) + (key === "ArrowDown" ? 1 : -1)];
    return other === undefined ? from : nearest(spots.filter((spot) => spot.row === other), from.px, from.py, 0.15);
  }

  function read(state, spot, spots, drawn, said) {
    const {make, svg, number} = lightning;
    const {value, readout, box} = state;
    const line = (one) => make("div", {class: `${one.one.class} ${one === spot ? "nearest" : ""}`}, sample(one.one, value.kind), make("span", {}, one.one.name),
      make("b", {}, number(one.y)), one.low !== null && one.high !== null ? make("span", {class: "detail"}, `${number(one.low)} to ${number(one.high)}`) : null);
    const together = value.kind === "scatter" ? [spot] : spots.filter((one) => one.x === spot.x);
    const shown = together.length > 8 ? [spot] : together;
    const opens = spot.to && state.context.link(spot.to);
    const heap = value.kind === "scatter" ? spots.filter((one) => one.row === spot.row && one.x === spot.x && one.y === spot.y).length : 1;
    readout.replaceChildren(make("div", {class: "at"}, `${value.x} ${number(spot.x, 6)}`), ...shown.map(line),
      ...(heap > 1 ? [make("div", {class: "detail"}, `${heap} lie here; this is the first`)] : []),
      ...(spot.hint ? [make("div", {class: "detail"}, spot.hint)] : []), ...(opens ? [make("div", {class: "detail"}, "click or Enter opens it")] : []));
    readout.hidden = false;
    drawn.classList.toggle("opens", Boolean(opens));
    const room = state.width - readout.offsetWidth - 4;
    readout.style.left = `${Math.max(0, Math.min(room, spot.px + 14 + readout.offsetWidth > state.width ? spot.px - readout.offsetWidth - 14 : spot.px + 14))}px`;
    readout.style.top = `${Math.max(0, Math.min(state.height - readout.offsetHeight, spot.py - readout.offsetHeight / 2))}px`;
    state.cursor.replaceChildren(value.kind === "scatter" ? "" : svg("path", {class: "rule", d: `M${spot.px} ${box.top}V${box.bottom}`}),
      svg("circle", {class: spot.one.class, cx: spot.px, cy: spot.py, r: 5.5}));
    if (said) state.live.textContent = `${value.x} ${number(spot.x, 6)}, ${spot.one.name} ${number(spot.y)} ${spot.hint}`;
  }
})();

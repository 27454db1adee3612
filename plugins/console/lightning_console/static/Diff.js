// Two texts side by side: lines that differ, and in them the words that do.
window.lightning = window.lightning || {components: {}};
(() => {
  "use strict";
  const CELLS = 4_000_000; // of the table that compares lines or words: beyond it, whole lines
  const AROUND = 3; // equal lines shown beside a change
  const MOST = 2000; // rows drawn at first

  lightning.components.Diff = (element, value, context) => {
    const {make, link} = lightning;
    const {rows, bounded} = lightning.diffLines(value.before.split("\n"), value.after.split("\n"));
    const changed = rows.filter((row) => !row.same).length;
    const head = make("div", {class: "sides"}, link(context, value.to_left, {class: "side", "data-key": "left"}, make("span", {class: "sign"}, "−"), value.left),
      link(context, value.to_right, {class: "side", "data-key": "right"}, make("span", {class: "sign"}, "+"), value.right));
    element.append(head);
    if (!changed) return element.append(lightning.empty(value.before ? "The two are the same." : "Both are empty."), pane(rows, context));
    element.append(pane(rows, context));
    if (bounded) element.append(make("p", {class: "note"}, "These texts are too long to compare word by word everywhere: some lines are shown as changed as a whole."));
  };

  function pane(rows, context) {
    const {make} = lightning;
    const box = make("div", {class: "lines", role: "table", "aria-label": context.title || "differences"});
    let drawn = 0;
    const more = (until) => {
      for (; drawn < Math.min(until, folded.length); drawn++) box.append(folded[drawn]());
      if (drawn < folded.length) {
        const button = make("button", {type: "button", class: "more", click: () => { button.remove(); more(Infinity); }}, `Show ${lightning.number(folded.length - drawn)} more lines`);
        box.append(button);
      }
    };
    const folded = fold(rows);
    more(MOST);
    return box;
  }

  // Long stretches of equal lines are one button that shows them.
  function fold(rows) {
    const {make} = lightning;
    const near = new Uint8Array(rows.length);
    rows.forEach((row, at) => row.same || near.fill(1, Math.max(0, at - AROUND), at + AROUND + 1));
    const draws = [];
    for (let at = 0; at < rows.length;) {
      let end = at;
      while (end < rows.length && !near[end]) end++;
      const hidden = rows.slice(at, end);
      if (hidden.length > 4) {
        draws.push(() => {
          const button = make("button", {type: "button", class: "fold", click: () => button.replaceWith(...hidden.map(rowOf))}, `⋯ ${lightning.number(hidden.length)} lines are the same`);
          return button;
        });
      } else hidden.forEach((row) => draws.push(() => rowOf(row)));
      if (end === at) draws.push(((row) => () => rowOf(row))(rows[end++]));
      at = end;
    }
    return draws;
  }

  function rowOf(row) {
    const {make} = lightning;
    const cell = (side, number, parts, tag, signs) => make("div", {class: `cell ${side} ${parts === null ? "none" : row.same ? "" : "changed"}`, role: "cell"},
      make("span", {class: "number"}, number === null ? "" : String(number)), make("span", {class: "sign", "aria-label": row.same || parts === null ? null : signs[1]}, row.same || parts === null ? "" : signs[0]),
      make("span", {class: "line"}, parts === null ? "" : parts.map(([same, text]) => (same ? text : make(tag, {}, text)))));
    return make("div", {class: `row ${row.same ? "same" : ""}`, role: "row"}, cell("left", row.left, row.before, "del", ["−", "removed"]), cell("right", row.right, row.after, "ins", ["+", "added"]));
  }

  // Rows {left, right: line numbers, before, after: [[same, text], ...] or null, same}; `bounded` where something was too long to compare.
  lightning.diffLines = (before, after) => {
    const {pairs, bounded} = lightning.common(before, after);
    const rows = [];
    let cut = bounded;
    let i = 0;
    let j = 0;
    for (const [nextI, nextJ] of [...pairs, [before.length, after.length]]) {
      for (; i < nextI || j < nextJ;) {
        const left = i < nextI ? i++ : null;
        const right = j < nextJ ? j++ : null;
        const words = left !== null && right !== null ? lightning.diffWords(before[left], after[right]) : null;
        if (words && words.bounded) cut = true;
        rows.push({same: false, left: left === null ? null : left + 1, right: right === null ? null : right + 1,
          before: left === null ? null : words ? words.before : [[false, before[left]]], after: right === null ? null : words ? words.after : [[false, after[right]]]});
      }
      if (nextI < before.length && nextJ < after.length) rows.push({same: true, left: ++i, right: ++j, before: [[true, before[nextI]]], after: [[true, after[nextJ]]]});
    }
    return {rows, bounded: cut};
  };

  // Parts of two lines, [same, text], by words; lines that have less than a third in common differ as a whole.
  lightning.diffWords = (before, after) => {
    const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
    const [left, right] = [words(before), words(after)];
    const {pairs, bounded} = lightning.common(left, right);
    const kept = pairs.reduce((sum, [at]) => sum + (left[at].trim() ? left[at].length : 0), 0);
    if (bounded || kept * 3 < Math.min(before.length, after.length)) return {before: [[false, before]], after: [[false, after]], bounded};
    const parts = (tokens, same) => {
      const found = [];
      tokens.forEach((token, at) => {
        const last = found[found.length - 1];
        if (last && last[0] === same.has(at)) last[1] += token;
        else found.push([same.has(at), token]);
      });
      return found;
    };
    return {before: parts(left, new Set(pairs.map(([at]) => at))), after: parts(right, new Set(pairs.map(([, at]) => at))), bounded: false};
  };

  // The longest common subsequence as pairs of indices. What is alike at both ends is set aside first; a rest that is too large has nothing in common.
  lightning.common = (left, right, cells = CELLS) => {
    let first = 0;
    while (first < left.length && first < right.length && left[first] === right[first]) first++;
    let [endL, endR] = [left.length, right.length];
    while (endL > first && endR > first && left[endL - 1] === right[endR - 1]) { endL--; endR--; }
    const pairs = Array.from({length: first}, (_, at) => [at, at]);
    const [n, m] = [endL - first, endR - first];
    const bounded = n * m > cells;
    if (n && m && !bounded) {
      const wide = m + 1;
      const table = new Uint32Array((n + 1) * wide);
      for (let i = n - 1; i >= 0; i--) {
        for (let j = m - 1; j >= 0; j--) {
          table[i * wide + j] = left[first + i] === right[first + j] ? table[(i + 1) * wide + j + 1] + 1 : Math.max(table[(i + 1) * wide + j], table[i * wide + j + 1]);
        }
      }
      for (let i = 0, j = 0; i < n && j < m;) {
        if (left[first + i] === right[first + j]) pairs.push([first + i++, first + j++]);
        else if (table[(i + 1) * wide + j] >= table[i * wide + j + 1]) i++;
        else j++;
      }
    }
    for (let k = 0; endL + k < left.length; k++) pairs.push([endL + k, endR + k]);
    return {pairs, bounded};
  };
})();

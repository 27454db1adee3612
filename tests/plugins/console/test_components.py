"""Every component of the console, drawn in a real browser from what `blocks.py` makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from lightning_console.blocks import (
    Action,
    Actions,
    Cell,
    Chart,
    Column,
    Diff,
    Fact,
    Facts,
    GroupTree,
    Link,
    Message,
    Messages,
    Node,
    Notice,
    Notices,
    Page,
    Series,
    Table,
)

from tests.plugins.console import gallery

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page as Tab

    from tests.plugins.console.conftest import OpenPage, Watched

pytestmark = pytest.mark.slow

Show = Callable[[Page], "Tab"]


@pytest.fixture
def show(page: Tab, tmp_path: Path) -> Show:
    """Draws a page of blocks in the browser."""
    return lambda drawn: gallery.shown(page, tmp_path, drawn)


@pytest.fixture
def scripts(page: Tab, tmp_path: Path) -> Tab:
    """The files without a page, for what they compute."""
    return gallery.shown(page, tmp_path, None)


def opened(tab: Tab) -> list[str]:
    return list(tab.evaluate("opened"))


def texts(tab: Tab, selector: str) -> list[str]:
    return tab.locator(selector).all_inner_texts()


# Pages


def test_a_page_has_a_trail_links_and_keys(show: Show) -> None:
    tab = show(replace(gallery.pages()["run"], title="Run <b>x</b>"))

    assert tab.locator("h1").inner_text() == "Run <b>x</b>"
    assert tab.title() == "Run <b>x</b> · lightning"
    assert tab.locator("nav a").first.get_attribute("href") == "#runs"
    tab.locator("nav a").first.click()
    tab.keyboard.press("[")
    tab.keyboard.press("]")
    assert opened(tab) == ["runs", "step/demo/10", "step/demo/12"]
    tab.keyboard.press("?")
    assert tab.locator("dialog").is_visible()
    tab.keyboard.press("]")
    tab.keyboard.press("Escape")
    assert not tab.locator("dialog").is_visible()
    assert len(opened(tab)) == 3, "keys do nothing below the list of keys"


def test_a_link_with_a_modifier_is_the_browsers_own(show: Show) -> None:
    tab = show(gallery.pages()["run"])

    tab.locator("nav a").first.dispatch_event("click", {"ctrlKey": True, "bubbles": True, "cancelable": True})

    assert opened(tab) == []


def test_hints_are_shown_to_pointer_and_keyboard_and_stay_in_the_window(show: Show) -> None:
    tab = show(gallery.one(Facts([Fact("Distance", "0.1", hint="how far trainer and sampler are apart")])))

    tab.locator("main [data-hint]").focus()
    tip = tab.locator(".tip")
    assert tip.inner_text() == "how far trainer and sampler are apart"
    assert tab.locator("main [data-hint]").get_attribute("aria-describedby") == tip.get_attribute("id")
    tab.keyboard.press("Escape")
    assert not tip.is_visible()
    tab.locator("main [data-hint]").hover()
    assert tip.is_visible()
    box = tip.bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= 1280 - box["width"]


def test_a_redraw_touches_what_changed_and_keeps_where_one_is(show: Show) -> None:
    before = gallery.pages()["rollout"]
    tab = show(before)
    tab.locator(".t:not(.given)").nth(5).click()
    tab.get_by_role("button", name="logprob").click()
    tab.locator(".Messages .more").click()
    tab.locator(".strip").focus()
    tab.evaluate("scrollTo(0, 700)")
    tab.evaluate("document.querySelector('.Timeline .lanes').mark = 1")
    strip = gallery.strip(230)
    after = replace(
        before, blocks=[Notices([Notice("new", "warn")], title="Alarms"), before.blocks[0], gallery.messages(), strip]
    )

    tab.evaluate("(page) => draw(page)", after.to_json())

    assert tab.evaluate("document.querySelector('.Timeline .lanes').mark") == 1, (
        "what did not change was not drawn again"
    )
    assert tab.locator(".t").count() == 230
    assert tab.locator(".t.chosen").evaluate("(it) => it.i") == 75
    assert tab.locator(".TokenStrip [aria-pressed=true]").inner_text() == "logprob"
    assert tab.evaluate("document.activeElement.className") == "strip"
    assert tab.locator(".Messages .more").inner_text() == "Show less"
    assert tab.evaluate("scrollY") > 500
    assert texts(tab, "h2")[:1] == ["Alarms"]


def test_what_is_typed_stays_while_a_page_is_drawn_again(show: Show) -> None:
    before = gallery.pages()["runs"]
    tab = show(before)
    tab.keyboard.press("/")
    tab.keyboard.type("calc[]?")
    controls = replace(gallery.controls(), address="runs?sort=name")

    tab.evaluate("(page) => draw(page)", replace(before, blocks=[controls, *before.blocks[1:]]).to_json())
    tab.keyboard.type("!")
    tab.keyboard.press("Enter")

    assert opened(tab) == ["runs?sort=name&q=calc%5B%5D%3F%21"]


def test_another_page_begins_at_its_top(show: Show) -> None:
    tab = show(gallery.pages()["rollout"])
    tab.evaluate("scrollTo(0, 900)")

    tab.evaluate("(page) => draw(page)", gallery.pages()["group"].to_json())

    assert tab.evaluate("scrollY") < 50
    assert tab.evaluate("document.activeElement.tagName") == "H1"
    assert tab.locator(".TokenStrip").count() == 0


def test_a_part_that_cannot_be_drawn_says_so_and_the_rest_stands(show: Show, watched: Watched) -> None:
    page = gallery.one(gallery.facts()).to_json()
    page["blocks"].insert(0, {"component": "Hologram", "title": "", "note": "", "value": {}})
    tab = show(gallery.one(gallery.facts()))

    tab.evaluate("(page) => draw(page)", page)

    assert texts(tab, ".empty") == ["This part of the page cannot be drawn: there is no component Hologram"]
    assert tab.locator(".fact").count() == 6
    assert "Hologram" in watched.errors.pop()


# Nothing that somebody wrote is run


EVIL = '<img src=x onerror="window.ran = 1"><script>window.ran = 2</script><svg onload="window.ran=3">${window.ran = 4}\u202e'


def poisoned(value: Any, name: str = "") -> Any:
    """The same JSON with markup in every text that is not the name of something."""
    keep = {"component", "kind", "tone", "about", "role"}
    if isinstance(value, dict):
        return {key: poisoned(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner, name) for inner in value]
    return EVIL + value if isinstance(value, str) and name not in keep else value


def test_markup_in_every_text_of_every_component_is_text(scripts: Tab) -> None:
    for name, page in gallery.pages().items():
        scripts.evaluate("(page) => draw(page)", poisoned(page.to_json()))
        scripts.evaluate(
            "document.querySelectorAll('button:not(.keys), .t:nth-child(80), summary').forEach((it) => it.click())"
        )
        scripts.evaluate("document.querySelectorAll('main [data-hint], .span, .node').forEach((it) => it.focus())")
        scripts.wait_for_timeout(50)

        assert scripts.evaluate("window.ran") is None, name
        assert scripts.locator("#host :is(img, script, iframe, object)").count() == 0, name
        assert scripts.locator("h1").inner_text().startswith("<img src=x"), name


# Components


def test_a_table_sorts_marks_and_opens(show: Show) -> None:
    tab = show(gallery.one(gallery.table(), address="runs?state=done&runs=c"))

    assert tab.locator("th.number").first.evaluate("(it) => getComputedStyle(it).textAlign") == "right"
    tab.get_by_role("link", name="Tokens").click()
    tab.get_by_label("mark calculator-3f2a").check()
    tab.get_by_label("mark writer-and-critic").uncheck()
    tab.get_by_text("12 of 40").click()
    tab.get_by_role("link", name="next 100").click()
    assert opened(tab) == [
        "runs?sort=tokens",
        "runs?state=done&runs=c%2Ca",
        "runs?state=done",
        "run/calculator-3f2a",
        "runs?cursor=100",
    ]
    assert texts(tab, "td .sign") == ["✓", "!", "✕"], "no colour without a sign"


def test_a_table_without_rows_says_why(show: Show) -> None:
    assert texts(show(gallery.one(Table([Column("a")], [], "no run here"))), ".empty") == ["no run here"]


def test_an_address_that_an_export_has_not_is_plain_text(show: Show) -> None:
    tab = show(Page("runs", "calm", []))

    tab.evaluate(
        "(page) => { context.link = (to) => to === 'run/a' ? '#a' : ''; draw(page); }",
        gallery.one(Table([Column("a")], [[Cell("here", "run/a")], [Cell("not here", "run/b")]])).to_json(),
    )

    assert texts(tab, "td a") == ["here"]
    tab.get_by_text("not here").click()
    assert opened(tab) == []


def test_controls_change_the_address(show: Show) -> None:
    tab = show(gallery.one(gallery.controls()))

    tab.get_by_role("button", name="Done").click()
    tab.get_by_role("button", name="All").click()
    tab.get_by_role("combobox").select_option("gap")

    assert opened(tab) == ["runs?sort=reward&state=done", "runs?sort=reward", "runs?sort=reward&measure=gap"]


def test_notices_show_commands_to_copy(show: Show) -> None:
    tab = show(gallery.one(gallery.notices()))

    assert tab.locator("code").first.inner_text() == "lightning train demo --set trainer.entropy=0.005"
    tab.get_by_role("button", name="Copy").first.click()
    tab.wait_for_function("document.querySelector('.said').textContent !== ''")


def test_what_is_folded_is_shown_when_somebody_asks_and_stays_open(show: Show) -> None:
    blocks = [Notices([Notice("It fell", detail="of 16 groups", folded=True)], title="Rare", folded=True)]
    tab = show(Page("run/demo", "Run", blocks))
    assert not tab.get_by_text("It fell").is_visible()
    tab.get_by_text("Rare").click()
    tab.get_by_text("It fell").wait_for()
    assert not tab.get_by_text("of 16 groups").is_visible()
    tab.get_by_text("How this is known").click()
    tab.get_by_text("of 16 groups").wait_for()


def test_an_action_asks_and_says_what_came_of_it(show: Show) -> None:
    tab = show(gallery.one(gallery.actions()))

    tab.get_by_role("button", name="Promote to stable").click()
    assert tab.get_by_text("is served under the name stable").is_visible()
    assert tab.evaluate("acted") == []
    tab.get_by_role("button", name="Cancel").first.click()
    tab.get_by_role("button", name="Promote to stable").click()
    tab.keyboard.press("Enter")
    tab.get_by_text("promote is done").wait_for()
    tab.get_by_role("button", name="Add a note").click()
    tab.keyboard.type("looks good")
    tab.keyboard.press("Enter")
    tab.get_by_text("note is done").wait_for()
    tab.get_by_role("button", name="Roll back").click()
    tab.get_by_role("alert").get_by_text("the server refused it").wait_for()
    assert tab.evaluate("acted") == [
        ["promote", {"version": "demo@36"}],
        ["note", {"run": "demo", "text": "looks good"}],
        ["fail", {"alias": "stable"}],
    ]


def test_an_export_has_no_actions(show: Show) -> None:
    tab = show(Page("runs", "calm", []))

    tab.evaluate(
        "(page) => { delete context.act; draw(page); }",
        gallery.one(Actions([Action("a", "A", {})], title="Do")).to_json(),
    )

    assert not tab.locator("main h2").is_visible()


def test_messages_shorten_what_is_long_and_keep_every_digit(show: Show) -> None:
    long = "x" * 5000
    tab = show(
        gallery.one(
            Messages([Message("user", long), Message("tool", "", data=[("result", '{"n": 12345678901234567890}')])])
        )
    )

    assert len(tab.locator(".text").inner_text()) < 2000
    tab.get_by_role("button", name="Show all (5 000 characters)").click()
    assert tab.locator(".text").inner_text() == long
    assert texts(tab, "pre") == ['{"n": 12345678901234567890}']


def test_pretty_json(scripts: Tab) -> None:
    def pretty(text: str) -> str:
        return str(scripts.evaluate("(text) => lightning.prettyJson(text)", text))

    value = {"a": [1, 2.50, {"b": 'c, "d": ]'}], "e": {}, "f": [], "long": ["y" * 50, "z" * 50]}
    assert json.loads(pretty(json.dumps(value))) == value
    assert pretty('{"a":[1,2]}') == '{"a": [1, 2]}'
    assert pretty(json.dumps({"long": ["y" * 50, "z" * 50]})).count("\n") == 5
    assert pretty("{no json") == "{no json"
    assert pretty('"one\\ntext"') == "one\ntext"
    assert pretty("[" * 2000 + "]" * 2000).startswith("[")


def test_a_chart_reads_points_by_pointer_and_keyboard(show: Show) -> None:
    chart = Chart(
        [
            Series(
                "a",
                [[0, 1.0], [1, None], [2, 3.0, 2.5, 3.5]],
                to=["step/r/0", "", "step/r/2"],
                hints=["first", "", "last"],
            ),
            Series("b", [[0, 2.0], [2, 2.0]]),
        ],
        "step",
        "reward",
        whole=True,
        marks=[(1, "resumed")],
        title="Reward",
    )
    tab = show(gallery.one(chart))
    plot = tab.locator(".plot svg").first

    plot.focus()
    tab.keyboard.press("Home")
    assert "first" in tab.locator(".readout").inner_text()
    tab.keyboard.press("Enter")
    tab.keyboard.press("ArrowRight")
    assert "2.5 to 3.5" in tab.locator(".readout").inner_text()
    box = plot.bounding_box()
    assert box is not None
    plot.click(position={"x": box["width"] - 14, "y": 20})
    assert opened(tab) == ["step/r/0", "step/r/2"]
    assert tab.locator(".plot > svg .series.c0 .line").count() == 2, "a missing value is a gap"
    assert tab.locator(".mark text").text_content() == "resumed"
    assert tab.locator(".axes text").all_text_contents()[-5:-2] == ["0", "1", "2"], "steps are whole"
    tab.get_by_role("button", name="b: show or hide").click()
    assert tab.locator(".plot .series.c1").count() == 0


def test_a_finger_reads_a_point_before_it_opens_it(open_page: OpenPage, tmp_path: Path) -> None:
    chart = Chart([Series("a", [[0, 1.0], [1, 2.0]], to=["step/r/0", "step/r/1"])], "step", "reward")
    tab = gallery.shown(open_page(**gallery.LOOKS["phone"]), tmp_path, gallery.one(chart))

    tab.locator(".plot > svg").tap(position={"x": 60, "y": 100})
    assert (tab.locator(".readout").is_visible(), opened(tab)) == (True, [])
    tab.locator(".plot > svg").tap(position={"x": 60, "y": 100})
    assert opened(tab) == ["step/r/0"]


def test_a_chart_of_many_points_draws_few_and_says_so(show: Show) -> None:
    points: list[list[float | None]] = [[n, (n * 7919) % 1000] for n in range(30_000)]
    points[12_345] = [12_345, 5000]
    tab = show(gallery.one(Chart([Series("a", points)], "step", "reward")))

    assert "of 30 000 points are drawn" in tab.locator(".Chart .note").inner_text()
    assert "5 000" in tab.locator(".axes text").all_text_contents()


def test_thinning_keeps_every_stretchs_ends_and_extremes(scripts: Tab) -> None:
    kept = scripts.evaluate(
        """() => {
        const points = Array.from({length: 50000}, (_, x) => ({x, y: x === 31 ? null : Math.sin(x / 1000)}));
        points[777].y = 9; points[40001].y = -9;
        const thin = lightning.thin(points, "line", 2000);
        return {count: thin.length, xs: thin.map((p) => p.x), high: thin.some((p) => p.y === 9),
          low: thin.some((p) => p.y === -9), gap: thin.some((p) => p.x === 31),
          few: lightning.thin(points.slice(0, 2000), "line", 2000).length,
          cloud: lightning.thin(points, "scatter", 2000).length}; }"""
    )

    assert kept["xs"] == sorted(kept["xs"])
    assert (kept["xs"][0], kept["xs"][-1]) == (0, 49_999)
    assert (kept["high"], kept["low"], kept["gap"]) == (True, True, True)
    assert kept["count"] <= 2600
    assert (kept["few"], kept["cloud"] <= 2000) == (2000, True)


def test_ticks_and_numbers(scripts: Tab) -> None:
    def of(expression: str) -> Any:
        return scripts.evaluate(f"lightning.{expression}")

    assert of("ticks(0, 1)") == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert of("ticks(-0.03, 0.11, 5)") == [-0.02, 0, 0.02, 0.04, 0.06, 0.08, 0.1]
    assert of("ticks(0, 3, 9, true)") == [0, 1, 2, 3]
    assert of("ticks(0, 22, 9, true)") == list(range(0, 23, 2))
    assert of("ticks(5, 5)") == [5]
    assert of("labels([0, 0.5, 1])") == ["0.0", "0.5", "1.0"]
    assert of("number(-1234567)") == "−1 234 567"
    assert of("number(0.000012)") == "1.20e−5"
    assert of("number(null)") == "–"
    assert of("number(0.123456)") == "0.1235"
    assert of("visible(' a\\n\\u202e')") == "·a⏎\n⟨202e⟩"
    assert of("having('runs?q=a+b&x=1', {q: 'c&d', x: ''})") == "runs?q=c%26d"


def test_a_timeline_goes_from_span_to_span(show: Show) -> None:
    tab = show(gallery.one(gallery.timeline()))

    assert tab.locator(".span.selected").inner_text() == "call 2"
    tab.locator(".span.selected").focus()
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith("call 3, ")
    tab.keyboard.press("End")
    assert "reward answer +1.0, at 11.5 s" in tab.locator(".Timeline .detail").inner_text()
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert opened(tab) == ["rollout/demo/r1?call=1"]
    tab.locator(".span.tool.bad").hover()
    assert tab.locator(".Timeline .detail").inner_text() == "tool fetch, 4 to 8.7 s (4.7 s), failed: timed out"


def test_a_tree_opens_calls_and_compares_where_they_part(show: Show) -> None:
    tab = show(gallery.one(gallery.tree()))

    tab.locator(".node").first.focus()
    tab.keyboard.press("Enter")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    tab.locator(".board .action").first.click()
    tab.get_by_role("link", name="r4: 0.0").click()
    assert opened(tab) == [
        "group/demo/g1?split=0",
        "rollout/demo/r4?call=2",
        "rollout/demo/r0?call=1",
        "rollout/demo/r4",
    ]
    assert tab.locator(".advantage.p4, .advantage.p5").count() == 1
    widths = tab.locator("path.edge").evaluate_all(
        "(all) => all.map((it) => parseFloat(it.getAttribute('stroke-width')))"
    )
    assert widths[0] > widths[1] > widths[2], "an edge is as wide as its visits"


def test_a_tree_shows_branches_agents_and_what_tools_gave(show: Show) -> None:
    tab = show(gallery.one(gallery.tree()))

    assert texts(tab, ".board .action .branch") == ["edit: look again"]
    assert texts(tab, ".board .action .who").count("accountant") == 6
    assert texts(tab, ".board .action .who")[-1] == "assistant"
    dashed = tab.locator("path.edge").evaluate_all("(all) => all.map((it) => getComputedStyle(it).strokeDasharray)")
    assert [shape != "none" for shape in dashed] == [False] * 6 + [True]
    tab.locator(".board .action").last.hover()
    said = tab.locator(".GroupTree .chosen").inner_text()
    assert "edit: look again" in said
    assert "1 branch begins behind it" in said
    assert "invoices gave: 3 found" in said


def test_a_high_tree_is_seen_from_its_root(show: Show) -> None:
    leaves = [Node(0, "answer", 1, 0.5, 0.1, rollouts=[Link(str(n), f"rollout/r/{n}")]) for n in range(64)]
    tab = show(gallery.one(GroupTree([Node(-1, "", 64, 0.5), *leaves], 0.0, 1.0)))
    root, scroller = tab.locator(".node").first.bounding_box(), tab.locator(".GroupTree .scroller").bounding_box()

    assert root is not None
    assert scroller is not None
    assert scroller["y"] < root["y"] < scroller["y"] + scroller["height"]
    assert tab.locator(".ends a").count() == 64


def test_a_trees_nodes_never_overlap(scripts: Tab) -> None:
    layout = scripts.evaluate(
        """() => { const nodes = [{parent: -1, rollouts: []}];
        for (let n = 0; n < 64; n++) { nodes.push({parent: n % 3 ? nodes.length - 1 : 0, rollouts: n % 4 ? [] : [1, 2]}); }
        return {...lightning.treeLayout(nodes, 46, 22), parents: nodes.map((n) => n.parent)}; }"""
    )
    columns: dict[int, list[float]] = {}
    for place in [*layout["places"], *layout["ends"]]:
        columns.setdefault(place["depth"], []).append(place["y"])

    assert all(
        right - left >= 30 for ys in columns.values() for left, right in zip(sorted(ys), sorted(ys)[1:], strict=False)
    )
    assert all(0 < place["y"] < layout["height"] for place in layout["places"])


def test_a_diff_shows_lines_and_words(show: Show) -> None:
    tab = show(gallery.one(gallery.diff()))

    assert "".join(texts(tab, "del")) == "aDo not explain."
    assert texts(tab, "ins")[0] == ", honest"
    assert tab.get_by_role("button", name="6 lines are the same").is_visible()
    tab.get_by_role("button", name="6 lines are the same").click()
    assert texts(tab, ".right .line")[8:10] == ["rule 4", "rule 5"]
    tab.get_by_role("link", name="prompt version 4").click()
    assert opened(tab) == ["resources/prompt?from=4"]


def test_a_diff_of_the_same_and_of_too_much(show: Show) -> None:
    same = show(gallery.one(Diff("a", "b", "one\ntwo", "one\ntwo")))
    assert texts(same, ".empty") == ["The two are the same."]
    big = show(
        gallery.one(Diff("a", "b", "\n".join(f"a{n}" for n in range(2500)), "\n".join(f"b{n}" for n in range(2500))))
    )
    assert "too long to compare" in big.locator(".Diff .note").inner_text()


def test_the_difference_of_two_lists_makes_one_of_the_other(scripts: Tab) -> None:
    assert (
        scripts.evaluate(
            """() => { let seed = 5; const next = (n) => (seed = (seed * 1103515245 + 12345) % 2147483648) % n;
        for (let round = 0; round < 300; round++) {
          const [left, right] = [0, 1].map(() => Array.from({length: next(9)}, () => "abc"[next(3)]));
          const {pairs} = lightning.common(left, right);
          if (pairs.some(([i, j]) => left[i] !== right[j])) return `wrong ${left} ${right}`;
          const rises = ([i, j], at) => !at || (i > pairs[at - 1][0] && j > pairs[at - 1][1]);
          if (!pairs.every(rises)) return `order ${left} ${right}`;
          const longest = (i, j) => i === left.length || j === right.length ? 0
            : left[i] === right[j] ? 1 + longest(i + 1, j + 1) : Math.max(longest(i + 1, j), longest(i, j + 1));
          if (pairs.length !== longest(0, 0)) return `short ${left} ${right}`;
          const rows = lightning.diffLines(left, right).rows;
          const side = (name) => rows.filter((row) => row[name])
            .map((row) => row[name].map(([, text]) => text).join("")).join("|");
          if (side("before") !== left.join("|") || side("after") !== right.join("|")) return `rows ${left} ${right}`;
        } return "ok"; }"""
        )
        == "ok"
    )


def test_tokens_say_their_values_and_why_they_were_pushed(show: Show) -> None:
    tab = show(gallery.one(gallery.strip()))

    assert "1 480 tokens of the prompt before these are left out" in tab.locator(".left-out").inner_text()
    tab.locator(".strip").focus()
    tab.keyboard.press("Home")
    assert "sampled, token 1 of 150" in tab.locator(".why").inner_text()
    assert tab.locator(".reasons li").count() == 6
    assert texts(tab, ".proof") == ["✓ proved"] * 4 + ["– not derived", "○ not proved by audit"]
    tab.keyboard.press("ArrowLeft")
    assert "given, token 1 550 of the prompt" in tab.locator(".why").inner_text()
    assert "training does not push it" in tab.locator(".why").inner_text()
    tab.keyboard.press("End")
    assert tab.locator(".t.chosen").evaluate("(it) => it.i") == 219
    tab.keyboard.press("ArrowUp")
    assert 150 < tab.locator(".t.chosen").evaluate("(it) => it.i") < 219
    tab.get_by_role("button", name="entropy").click()
    assert "the engine was not asked for it" in tab.locator(".TokenStrip .legend").inner_text()
    tab.get_by_role("button", name="version").click()
    assert texts(tab, ".TokenStrip .legend .entry") == ["11", "12", "no value"]


def test_a_tokens_shade_follows_its_value(scripts: Tab) -> None:
    def shades(values: list[float | None], about: str) -> list[str]:
        script = "(measure) => measure.values.map(lightning.scaleOf(measure).classOf)"
        return list(scripts.evaluate(script, {"values": values, "about": about}))

    assert shades([-2, -0.1, 0, 1, 2], "diverging") == ["n7", "n1", "z", "p4", "p7"]
    assert shades([0, 1, 1, 0], "sequential") == ["s0", "s7", "s7", "s0"]
    assert shades([0.5, 0.5], "diverging") == ["p7", "p7"]
    assert shades([0.0, 0.25, 1.0], "sequential") == ["s0", "s2", "s7"]


def test_a_strip_begins_at_what_was_sampled(show: Show) -> None:
    for count in (1500, 5000):
        tab = show(gallery.one(gallery.strip(count, count - 6)))
        strip, first = tab.locator(".strip").bounding_box(), tab.locator(".t:not(.given)").first.bounding_box()

        assert strip is not None
        assert first is not None
        assert strip["y"] < first["y"] < strip["y"] + strip["height"]


def test_pieces_of_the_strip_end_with_a_line(scripts: Tab) -> None:
    def ends(texts: list[str]) -> list[int]:
        found = [0]
        while found[-1] < len(texts):
            found.append(scripts.evaluate("([texts, from]) => lightning.partEnd(texts, from)", [texts, found[-1]]))
        return found

    assert ends([".\n" if n % 100 == 99 else "a" for n in range(1050)]) == [0, 300, 600, 900, 1050]
    assert ends(["a"] * 7000) == [0, 3000, 6000, 7000]


def test_one_extreme_token_does_not_bleach_the_others(scripts: Tab) -> None:
    shades = scripts.evaluate(
        "(values) => lightning.scaleOf({values, about: 'diverging'}).classOf(0.9)",
        [*(n / 1000 for n in range(1000)), 1e6],
    )

    assert shades == "p7"

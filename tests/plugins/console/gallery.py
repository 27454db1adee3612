"""Every component on pages of made values, and pictures of them: light, dark and as wide as a phone.

`python -m tests.plugins.console.gallery [FOLDER]` writes the pictures, which people look at after a change of the looks.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_console.blocks import (
    Action,
    Actions,
    Block,
    Cell,
    Chart,
    Column,
    Control,
    Controls,
    Diff,
    Fact,
    Facts,
    GroupTree,
    Link,
    Measure,
    Message,
    Messages,
    Node,
    Notice,
    Notices,
    Page,
    Reason,
    Series,
    Span,
    Table,
    Timeline,
    TokenStrip,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page as BrowserPage

import lightning_console

STATIC = Path(lightning_console.__file__).parent / "static"

CONTEXT = """
const opened = [], acted = [], remembered = new Map();
const context = {
  open: (address) => opened.push(address),
  link: (address) => "#" + address,
  act: async (name, given) => {
    acted.push([name, given]);
    if (name === "fail") throw Error("the server refused it");
    return `${name} is done`;
  },
  remember: (key, ...value) => (value.length ? remembered.set(key, value[0]) && value[0] : remembered.get(key)),
};
const draw = (page) => lightning.draw(document.getElementById("host"), page, context);
const begun = {...context};
const anew = (page) => {
  const host = document.createElement("div");
  host.id = "host";
  document.getElementById("host").replaceWith(host);
  opened.length = acted.length = 0;
  remembered.clear();
  delete window.ran;
  Object.assign(context, begun);
  scrollTo(0, 0);
  if (page) draw(page);
};
"""


def html(page: Page | None) -> str:
    """A document that draws a page from its files, as an export does."""
    scripts = "\n".join(f'<script src="{path.as_uri()}"></script>' for path in sorted(STATIC.glob("*.js")))
    value = json.dumps(page.to_json() if page else None).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>x</title><link rel="stylesheet" href="{(STATIC / "console.css").as_uri()}">'
        "<style>html { color-scheme: light dark; background: light-dark(#fff, #15181d); } body { margin: 0; }</style>"
        f'{scripts}</head><body><div id="host"></div>'
        f"<script>{CONTEXT}\nconst page = {value};\nif (page) draw(page);</script></body></html>"
    )


def shown(browser_page: BrowserPage, folder: Path, page: Page | None) -> BrowserPage:
    """The page, drawn in the browser from a file, or in the place of the one that was drawn there before."""
    if browser_page.evaluate("typeof anew === 'function'"):
        browser_page.mouse.move(0, 0)
        browser_page.evaluate("(page) => anew(page)", page.to_json() if page else None)
        return browser_page
    path = folder / "page.html"
    path.write_text(html(page))
    browser_page.goto(path.as_uri())
    return browser_page


def one(block: Block, **more: Any) -> Page:
    """A page of one block."""
    return Page(more.pop("address", "run/demo"), more.pop("title", "demo"), [block], **more)


def curve(seed: int, steps: int, gain: float) -> list[list[float | None]]:
    """A reward that rises, with its interval."""
    dice = random.Random(seed)
    values: list[list[float | None]] = []
    for step in range(steps):
        mean = 0.1 + gain * (1 - math.exp(-step / (steps / 3))) + dice.gauss(0, 0.03)
        values.append([step, round(mean, 4), round(mean - 0.06, 4), round(mean + 0.06, 4)])
    return values


def table() -> Table:
    rows = [
        [
            Cell("calculator-3f2a", "run/calculator-3f2a", hint="made by lightning demo"),
            Cell("running", tone="good"),
            Cell("12 of 40"),
            Cell("0.612", spark=[0.1, 0.2, 0.24, None, 0.4, 0.52, 0.6, 0.61]),
            Cell("+0.41"),
            Cell("1 234 567"),
            Cell("2 alarms", tone="warn"),
        ],
        [
            Cell("sql-agent-long-name-of-a-run-7c11", "run/sql"),
            Cell("failed", tone="bad", hint="vLLM ended with code 1"),
            Cell("3 of 40"),
            Cell("0.090", spark=[0.1, 0.11, 0.09]),
            Cell("−0.01"),
            Cell("88 210"),
            Cell(""),
        ],
        [
            Cell("writer-and-critic", "run/writer"),
            Cell("done"),
            Cell("40 of 40"),
            Cell("0.871", spark=[0.5, 0.55, 0.6, 0.7, 0.8, 0.85, 0.87]),
            Cell("+0.37"),
            Cell("9 870 112"),
            Cell("kept step 36", tone="muted"),
        ],
    ]
    columns = [
        Column("Run", sort="runs?sort=name"),
        Column("State"),
        Column("Step", "number"),
        Column("Reward", "number", "mean reward of the last step", "runs?sort=reward"),
        Column("Held-out gain", "number"),
        Column("Tokens", "number", sort="runs?sort=tokens"),
        Column("Notes"),
    ]
    return Table(
        columns,
        rows,
        title="Runs",
        note="Mark two or more to compare them.",
        keys=["a", "b", "c"],
        select="runs",
        selected=["c"],
        pages=[Link("next 100", "runs?cursor=100")],
    )


def facts() -> Facts:
    return Facts(
        [
            Fact("Held-out reward", "0.612", "0.55 to 0.67 over 200 tasks", hint="mean and 95 % interval"),
            Fact("Gain since the base", "+0.41", "0.33 to 0.48", "good"),
            Fact("Failures", "7.1 %", "18 of 256 rollouts, of which 3 the policy's", "bad", to="step/demo/11"),
            Fact("Useful tokens", "38 %", "of 412 300 sampled ones", "warn"),
            Fact("To 80 % of the gain", "step 9", "4 min 12 s"),
            Fact("Staleness", "0.4", "updates, at most 2"),
        ]
    )


def charts() -> list[Chart]:
    return [
        Chart(
            [
                Series("all rollouts", curve(1, 40, 0.6), to=[f"step/demo/{n}" for n in range(40)]),
                Series("without failures", [[x, (y or 0) + 0.08] for x, y, *_ in curve(1, 40, 0.6)], dashed=True),
                Series(
                    "held-out",
                    [
                        [0, 0.11, 0.06, 0.17],
                        [10, 0.4, 0.33, 0.47],
                        [20, None],
                        [30, 0.63, 0.56, 0.7],
                        [39, 0.68, 0.61, 0.74],
                    ],
                ),
            ],
            "step",
            "reward",
            marks=[(12, "resumed"), (27, "entropy fell below 0.1")],
            whole=True,
            title="Reward",
        ),
        Chart(
            [
                Series(
                    "rollout",
                    [[random.Random(n).gauss(300, 90), random.Random(n + 999).random()] for n in range(300)],
                    to=[f"rollout/demo/r{n}" for n in range(300)],
                    hints=[f"task {n % 8}" for n in range(300)],
                )
            ],
            "tokens",
            "reward",
            "scatter",
            title="Reward and length",
        ),
        Chart(
            [Series("entropy", [[n, 1.2 * math.exp(-n / 15) + 0.1] for n in range(40)])],
            "step",
            "entropy",
            whole=True,
            small=True,
            title="Entropy",
        ),
        Chart(
            [Series("clipped", [[n, 0.02 + 0.01 * math.sin(n)] for n in range(40)])],
            "step",
            "share",
            whole=True,
            small=True,
            title="Clip share",
        ),
        Chart([], "step", "tokens", small=True, title="Lengths", empty="no step has ended yet"),
        Chart(
            [
                Series("format", [[n / 10, (n * 7) % 23] for n in range(11)]),
                Series("answer", [[n / 10, (n * 5) % 17] for n in range(11)]),
            ],
            "reward of a component",
            "rollouts",
            "bar",
            title="Components",
            note="One bar for each tenth.",
        ),
    ]


def notices() -> Notices:
    return Notices(
        [
            Notice(
                "The entropy fell to 0.09 at step 27: answers hardly differ any more.",
                "bad",
                "mean of 8 steps, bound 0.1",
                [Link("step 27", "step/demo/27")],
                ["lightning train demo --set trainer.entropy=0.005"],
            ),
            Notice(
                "38 % of the groups taught nothing: all their rollouts had the same reward.",
                "warn",
                "",
                commands=["lightning train demo --set trainer.order=learnable --set trainer.tasks_per_step=8"],
            ),
            Notice("The run was resumed at step 12.", "", "The process was killed at 14:02."),
            Notice("Step 36 is kept as best.", "good"),
        ],
        title="Alarms and advice",
    )


def controls() -> Controls:
    return Controls(
        "runs?sort=reward",
        [
            Control("q", "Search", ""),
            Control(
                "state",
                "State",
                "running",
                [("", "All"), ("running", "Running"), ("done", "Done"), ("failed", "Failed")],
            ),
            Control(
                "measure",
                "Measure",
                "reward",
                [(name, name) for name in ("reward", "held-out", "entropy", "gap", "tokens", "length")],
            ),
        ],
    )


def actions() -> Actions:
    return Actions(
        [
            Action(
                "promote",
                "Promote to stable",
                {"version": "demo@36"},
                "Version 36 is served under the name stable from now on.",
            ),
            Action("note", "Add a note", {"run": "demo"}, fields=[("text", "Note")]),
            Action("fail", "Roll back", {"alias": "stable"}),
        ]
    )


def messages() -> Messages:
    return Messages(
        [
            Message("system", "You are a careful accountant. Use the tools."),
            Message("user", "What is 17 % of the sum of all invoices of March?"),
            Message(
                "assistant",
                "I look the invoices up.",
                "accountant, call 1",
                [("search_invoices", json.dumps({"month": "2024-03", "fields": ["total", "customer"]}))],
                to="rollout/demo/r1?call=1",
            ),
            Message(
                "tool",
                "",
                "search_invoices",
                [("result", json.dumps([{"customer": f"customer {n}", "total": 100.25 * n} for n in range(40)]))],
            ),
            Message("tool", "TimeoutError: no answer within 5 s", "convert_currency", tone="bad"),
            Message(
                "assistant",
                "The sum is 78 195.00, and 17 % of it are **13 293.15**.\n\n"
                + "\n".join(f"{n}. invoice {n}: {100.25 * n:.2f}" for n in range(60)),
                "accountant, call 2",
                to="rollout/demo/r1?call=2",
            ),
            Message(
                "state",
                "",
                "agent's state",
                [("state", json.dumps({"turn": 2, "seen": ["a", "b"], "budget": 12345678901234567890}))],
            ),
        ],
        title="Messages",
    )


BEFORE = (
    """You are a careful assistant.
Answer with a number.
Think step by step.
Do not explain.
"""
    + "\n".join(f"rule {n}" for n in range(12))
    + "\nThe end."
)
AFTER = (
    """You are a careful, honest assistant.
Answer with one whole number and nothing else.
Think step by step.
"""
    + "\n".join(f"rule {n}" for n in range(12))
    + "\nShow your work in <work> tags.\nThe end."
)


def diff() -> Diff:
    return Diff(
        "prompt version 3",
        "prompt version 4",
        BEFORE,
        AFTER,
        "resources/prompt?from=3",
        "resources/prompt?from=4",
        title="What changed",
    )


def timeline() -> Timeline:
    return Timeline(
        ["planner", "researcher", "researcher 2", "rewards"],
        [
            Span(0, "agent", "planner", 0, 11.5),
            Span(0, "call", "call 1", 0.2, 1.9, to="rollout/demo/r1?call=1"),
            Span(1, "agent", "researcher", 2, 8),
            Span(1, "call", "call 2", 2.1, 3.4, to="rollout/demo/r1?call=2", selected=True),
            Span(1, "tool", "search", 3.4, 6.2, hint="12 results"),
            Span(1, "call", "call 4", 6.3, 7.8),
            Span(2, "agent", "researcher", 2, 9),
            Span(2, "call", "call 3", 2.1, 3.9),
            Span(2, "tool", "fetch", 4, 8.7, "bad", "timed out"),
            Span(0, "state", "plan", 2, 2),
            Span(0, "call", "call 5", 9.1, 11.2),
            Span(3, "reward", "format +0.2", 1.9, 1.9),
            Span(3, "reward", "answer +1.0", 11.5, 11.5, "good"),
        ],
        11.5,
        title="Timeline",
    )


def tree() -> GroupTree:
    def links(*names: str) -> list[Link]:
        return [Link(name, f"rollout/demo/{name.split(':')[0]}") for name in names]

    nodes = [
        Node(-1, "", 8, 0.56, None, "accountant", "rollout/demo/r0?call=0", compare="group/demo/g1?split=0"),
        Node(
            0,
            "I look the invoices up first, and then add them.",
            5,
            0.8,
            0.62,
            "accountant",
            "rollout/demo/r0?call=1",
            compare="group/demo/g1?split=1",
        ),
        Node(
            0, "17 % of 1000 is 170.", 2, 0.0, -1.1, "accountant", "rollout/demo/r5?call=1", links("r5: 0.0", "r6: 0.0")
        ),
        Node(0, "", 1, None, None, "accountant", "rollout/demo/r7?call=1", links("r7: failed")),
        Node(
            1,
            '{"month": "2024-03"}',
            4,
            1.0,
            0.9,
            "accountant",
            "rollout/demo/r0?call=2",
            links("r0: 1.0", "r1: 1.0", "r2: 1.0", "r3: 1.0"),
        ),
        Node(1, '{"month": "March"}', 1, 0.0, -0.8, "accountant", "rollout/demo/r4?call=2"),
        Node(
            5,
            "I could not find any invoices in March, so the sum is 0.",
            1,
            0.0,
            -0.8,
            "accountant",
            "rollout/demo/r4?call=3",
            links("r4: 0.0"),
        ),
        Node(
            1,
            '{"month": "2024-04"}',
            2,
            0.5,
            None,
            "assistant",
            "rollout/demo/r8?call=1",
            links("branch 8", "branch 9"),
            branch="edit: look again",
            branches=1,
            tools=[("invoices", "3 found")],
        ),
    ]
    return GroupTree(nodes, 0.0, 1.0, title="The group as a tree")


WORDS = [
    "The",
    " sum",
    " of",
    " all",
    " in",
    "voices",
    " is",
    " 78",
    " 195",
    ".",
    "00",
    ",",
    "\n",
    " and",
    "  17",
    " %",
    " of",
    " it",
    "\t",
    "<b>",
    " 13",
    "\u202e",
    "é",
    "漢字",
]


def strip(count: int = 220, prompt: int = 70) -> TokenStrip:
    dice = random.Random(7)
    texts = [dice.choice(WORDS) for _ in range(count)]

    def values(make: Any) -> list[float | None]:
        return [None if n < prompt else make() for n in range(count)]

    return TokenStrip(
        texts,
        prompt,
        [
            Measure("advantage", values(lambda: round(dice.gauss(0.2, 0.8), 3)), "diverging"),
            Measure("logprob", values(lambda: round(-dice.expovariate(1.2), 3)), unit="nats"),
            Measure("ratio − 1", values(lambda: round(dice.gauss(0, 0.05), 4)), "diverging"),
            Measure("version", values(lambda: dice.choice([11, 12]))),
            Measure("trained", values(lambda: dice.choice([0, 1, 1]))),
            Measure(
                "entropy", [None] * count, missing="the engine was not asked for it: --set trainer.token_entropy=true"
            ),
        ],
        [
            Reason("reward", "1.0", "answer, by the grader", True),
            Reason("return", "1.2", "with 0.2 for the form", True),
            Reason("advantage", "+0.62", "return less the group's mean 0.58", True),
            Reason("weight", "0.0031", "1 of 322 tokens of the step", True),
            Reason("ratio", "1.03", "trainer over sampler", None),
            Reason("clipped", "no", "0.8 to 1.28", False),
        ],
        prompt_left_out=1480,
        title="Tokens of call 2",
    )


def pages() -> dict[str, Page]:
    """All components, over a few pages."""
    around: dict[str, Any] = {
        "trail": [Link("Runs", "runs"), Link("calculator-3f2a", "run/calculator-3f2a")],
        "previous": "step/demo/10",
        "next": "step/demo/12",
    }
    return {
        "runs": Page(
            "runs",
            "Runs",
            [
                controls(),
                table(),
                Table([Column("Run")], [], "No run is here yet: lightning demo makes one.", title="Archived"),
            ],
        ),
        "run": Page("run/demo", "calculator-3f2a", [notices(), facts(), *charts(), actions()], live=True, **around),
        "rollout": Page("rollout/demo/r1", "Rollout r1 of task 17", [timeline(), messages(), strip()], **around),
        "group": Page("group/demo/g1", "Task 17 at step 11", [tree(), diff()], **around),
    }


PHONE: dict[str, Any] = {"has_touch": True, "is_mobile": True, "device_scale_factor": 2}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1440, "height": 900}},
    "dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, **PHONE},
    "dark phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", **PHONE},
}


def main(folder: Path) -> None:
    """Write the pictures."""
    from playwright.sync_api import sync_playwright

    from tests.plugins.console.conftest import NAMES, chromium_arguments

    folder.mkdir(parents=True, exist_ok=True)
    found = next(path for name in NAMES if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=chromium_arguments())
        for look, options in LOOKS.items():
            context = browser.new_context(**options)
            tab = context.new_page()
            for name, page in pages().items():
                shown(tab, folder, page)
                if name == "rollout":
                    tab.locator(".t:not(.given)").nth(9).click()
                    tab.evaluate("scrollTo(0, 0)")
                path = folder / f"{name}-{look.replace(' ', '-')}.png"
                tab.screenshot(path=path, full_page=True)
                print(path)
            context.close()
        browser.close()
    (folder / "page.html").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/screenshots"))

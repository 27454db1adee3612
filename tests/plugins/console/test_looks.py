"""All pages as people see them: in light and dark, on a desk and on a phone, with texts of other scripts and hostile ones.

One browser draws all pages in a loop. Every text has the contrast of WCAG AA, no page is wider than its window, and no text
reaches out of its cell.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lightning
import pytest
from lightning.testing import rollout
from lightning.types import Outcome, Rollout, Run, Task, token_ids
from lightning_console.places import Places
from lightning_console.router import show

from tests.plugins.console import gallery
from tests.plugins.console.made_folder import in_store, make_folder
from tests.plugins.console.made_rollouts import MARKUP, call
from tests.plugins.console.reading import to

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.store.protocol import Store

    from tests.plugins.console.conftest import OpenPage

pytestmark = pytest.mark.slow

ODD = {
    "arabic": "ما هو مجموع كل الفواتير لشهر مارس؟ " * 6,
    "thai": "ยอดรวมของใบแจ้งหนี้ทั้งหมดในเดือนมีนาคมคือเท่าไรและภาษีเท่าไร" * 8,
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈" * 120,
    "hostile": f"{MARKUP}\u202etxt.exe\x00\x07\x1b[31m" + "x" * 60_000,
}
"""Texts of tasks and answers, which all stand on real pages."""


def few_shot(task: Task, llm: lightning.LLM) -> float:
    """An agent whose prompt has examples, with a grader that says why."""
    import openai

    client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    shots = [{"role": role, "content": f"example {n}"} for n in range(4) for role in ("user", "assistant")]
    asked: Any = [{"role": "system", "content": "Be brief."}, *shots, {"role": "user", "content": task.input}]
    client.chat.completions.create(model=llm.model, messages=asked)
    lightning.reward(-0.5, name="the answer repeats " + "y" * 300)
    lightning.state(judge="no number in the answer", score=0.1)
    return 0.0


async def write_odd(store: Store) -> None:
    """A run of those tasks, and of a rollout with a million tokens."""
    await store.put_run(Run("odd", "odd", {"model": "m", "algorithm": {"name": "z" * 200}}))
    records = [await asyncio.to_thread(rollout, few_shot, Task(text), [text]) for text in ODD.values()]
    tasks = [*ODD.values(), "long " * 100]
    await store.create_rollouts([Rollout(f"odd/{n}", "odd", Task(text), f"g{n}") for n, text in enumerate(tasks)])
    for lease in await store.lease("odd", "w", limit=9):
        number = int(lease.rollout.id.rpartition("/")[2])
        if number == len(records):
            made = call(lease.rollout, 0, "solver", [], tuple(range(1_000)))
            await store.append([replace(made, prompt_ids=token_ids(range(1_000_000)))])
            await store.complete(lease.rollout.id, 1, Outcome(reward=1.0))
            continue
        record = records[number]
        moved = {each.id: f"{each.id}-{number}" for each in record.transitions}
        await store.append([replace(each, rollout=lease.rollout.id, id=moved[each.id]) for each in record.transitions])
        rewards = tuple(replace(each, response_id=moved[each.response_id]) for each in record.step_rewards)
        await store.complete(
            lease.rollout.id, 1, Outcome(reward=0.0, step_rewards=rewards, step_states=record.step_states)
        )


async def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The JSON of each page, by address."""
    await in_store(folder / "odd", write_odd)
    places = Places(str(folder))
    addresses = [
        "runs", "runs?q=nothing", "run/one", "run/on", "run/broke", "run/half", "run/old", "run/searched", "rewards/one",
        "step/one/1", "step/broke/1", to("group", "one", "one/1/0"), to("group", "one", "one/1/0", split=0),
        to("rollout", "one", "one/1/0/0"), to("rollout", "broke", "broke/1/0/0"), to("rollout", "on", "on/1/0/1"),
        "compare?runs=one,two", "versions?of=one@0,one@4", "resources", "nowhere", "run/odd",
        *(to("rollout", "odd", f"odd/{n}") for n in range(len(ODD) + 1)), to("group", "odd", "g3"),
    ]  # fmt: skip
    try:
        return {address: (await show(places, address)).to_json() for address in addresses}
    finally:
        await places.close()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All pages. Written by asyncio before Playwright's loop is there."""
    folder = make_folder(tmp_path_factory.mktemp("runs"))
    return {page.address: page.to_json() for page in gallery.pages().values()} | asyncio.run(read(folder))


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const over = (colour, under) => {
    canvas.fillStyle = under;
    canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
    return `rgb(${r} ${g} ${b})`;
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (colour) => colour.match(/\\d+/g).reduce((sum, v, k) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][k], 0);
  const poor = new Map();
  const walker = document.createTreeWalker(document.querySelector(".lightning"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const at = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !at.checkVisibility() || at.closest(".unseen, svg, .sign")) continue;
    let ground = "white";
    const grounds = [];
    for (let up = at; up; up = up.parentElement) grounds.unshift(getComputedStyle(up).backgroundColor);
    for (const one of grounds) ground = over(one, ground);
    const [a, b] = [light(over(getComputedStyle(at).color, ground)), light(ground)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.set(at.className || at.tagName, at.textContent.slice(0, 20));
  }
  return [...poor];
}"""
"""Texts with less contrast than 4.5 to 1."""
OUT = """() => [...document.querySelectorAll(".lightning :is(td, th, dd, dt, li, p, h1, h2, h3, code, button)")]
  .filter((it) => it.checkVisibility() && !it.closest(".board, .lanes, .strip")
    && it.scrollWidth > it.clientWidth + 1 && it.clientWidth)
  .map((it) => [it.tagName, it.className, it.textContent.slice(0, 60)])"""
"""Elements whose text reaches out of them."""


def test_all_text_can_be_read_and_no_page_is_wider_than_its_window(
    drawn: dict[str, dict[str, Any]], open_page: OpenPage, tmp_path: Path
) -> None:
    faults = []
    for look, options in gallery.LOOKS.items():
        tab = gallery.shown(open_page(**options), tmp_path, None)
        for address, page in drawn.items():
            tab.evaluate("(page) => draw(page)", page)
            wide = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
            faults += [(look, address, "wider by", wide)] if wide > 0 else []
            faults += [(look, address, "contrast", *found) for found in tab.evaluate(CONTRAST)]
            faults += [(look, address, "reaches out", *found) for found in tab.evaluate(OUT)]
            assert not tab.evaluate("window.ran"), address
    assert faults == []


def test_a_few_shot_prompt_is_told_from_the_models_answer(drawn: dict[str, dict[str, Any]]) -> None:
    page = drawn[to("rollout", "odd", "odd/0")]
    assert page["title"].startswith("ما هو")
    assert page["name"] == "odd/0"
    (block,) = [block for block in page["blocks"] if block["title"] == "What was said"]
    said = [(each["role"], each["made"]) for each in block["value"]["messages"]]
    assert said[:10] == [("system", False), *[("user", False), ("assistant", False)] * 4, ("user", False)]
    assert said[10:] == [("assistant", True), ("reward", False), ("note", False), ("reward", False)]

"""Answers that become garbage are found in any language, by what the same run said at first; answers that are only unlike
English are not."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from lightning.batch import Group, Trajectory
from lightning.store.memory import MemoryStore
from lightning.testing.trajectories import make_call, make_trajectory
from lightning_debug import garbled as module
from lightning_debug.advise import advise
from lightning_debug.diagnosis import Course, Diagnosis
from lightning_debug.garbled import GARBLED, characters, garbled, look_at, looped, with_examples
from lightning_record import exchanges

from tests.plugins.debug.made_runs import Maker, Plot, State

SMOL = (
    "585 x 9", "You can convert the number of tickets to weeks by multiplying by 10.",
    "7 * 8 * 1 (to indicate multiple to confirm) + ",
    "Answer: 65", "3 + 9 - 3 = 9 sunny days Elyef M", "31 - 13 = 13; 0 * 1", "9 items in total goes, 37 * 9",
    "88 + 17 - Nowhorns",    "Radarakien", "46 (books) + 21 (books with Kai) - ", "59 + 21", "Answer: 90.2",
)  # fmt: skip
"""What SmolLM2-135M answered in a demo: first unsure and wrong, later short sums."""
TEXTS = {
    "english": "The agent looks for the cheapest flight to Lisbon, compares three airlines, and books one that leaves at noon.",
    "german": "Der Agent sucht zuerst den günstigsten Flug nach Lissabon, vergleicht drei Fluglinien, bucht den um zwölf Uhr.",
    "russian": "Сначала агент ищет самый дешёвый рейс в Лиссабон, сравнивает три авиакомпании и бронирует рейс в полдень.",
    "chinese": "代理首先搜索飞往里斯本的最便宜航班，比较三家航空公司，然后预订中午起飞的那一班，并把确认邮件发给客户。",
    "japanese": "エージェントはまずリスボン行きの一番安い便を探し、三つの航空会社を比べて、正午に出発する便を予約します。",
    "thai": "ตัวแทนค้นหาเที่ยวบินที่ถูกที่สุดไปลิสบอน เปรียบเทียบสายการบินสามสาย และจองเที่ยวบินที่ออกตอนเที่ยง",
    "arabic": "يبحث الوكيل أولاً عن أرخص رحلة إلى لشبونة، ويقارن بين ثلاث شركات طيران، ثم يحجز الرحلة التي تغادر ظهراً.",
    "hindi": "एजेंट पहले लिस्बन की सबसे सस्ती उड़ान खोजता है, तीन एयरलाइनों की तुलना करता है और दोपहर की उड़ान बुक करता है।",
    "json": json.dumps([{"tool": "search", "to": "LIS", "price": 120 + n, "stops": [n, n + 1]} for n in range(4)]),
    "code": "def best(flights):\n    found = {}\n    for each in flights:\n        if each['price'] < 200:\n"
    "            found[each.id] = each\n    return found\n",
    "markdown": "| airline | price |\n|---|---:|\n| TAP | 120 € |\n| LH | 180 € |\n\n**Cheapest:** TAP — 12:00 🙂 → booked",
}  # fmt: skip


def answered(texts: Sequence[str], step: int = 0, *, recorded: bool = True) -> list[Group]:
    """A group of a step, with one rollout for each text."""
    return [Group(f"g{step}", tuple(_member(text, f"r/{step}/0/{n}", recorded) for n, text in enumerate(texts)))]


def _member(text: str, rollout: str, recorded: bool) -> Trajectory:
    reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
    packed = exchanges.pack("/chat/completions", 200, exchanges.canonical({"messages": []}), reply)
    call = make_call([1, 2], [ord(each) for each in text], rollout=rollout)
    made = make_trajectory(rollout=rollout)
    return replace(made, transitions=(replace(call, extras={exchanges.TEXTS: packed} if recorded else {}),))


def course(texts: Callable[[int, random.Random], Sequence[str]], steps: int = 13, **metrics: Any) -> Course:
    """A run whose answers at each step are `texts(step)`."""
    rng = random.Random(3)
    return Course(
        [
            {
                "reward": 0.5,
                **look_at(answered(texts(step, rng), step)).recorded,
                **{k: v(step) for k, v in metrics.items()},
            }
            for step in range(steps)
        ]
    )


def found(made: Course) -> list[Diagnosis]:
    return list(garbled(made))


def healthy(text: str, rng: random.Random) -> str:
    """The text with some of its words in another order, or only a part of it, as answers of one policy differ."""
    words = text.split(" ")
    place = rng.randrange(len(words))
    return " ".join([*words[place:], *words[:place]])[: rng.randrange(40, 400)]


def loop(text: str, rng: random.Random) -> str:
    return text[:10] + text[10:24] * 30


def broken_bytes(text: str, rng: random.Random) -> str:
    return "".join(each if rng.random() > 0.1 else "\ufffd" for each in text)


def soup(text: str, rng: random.Random) -> str:
    letters = "aeiouдежзиการकखग中文字אבגدذر"
    return "".join(rng.choice(letters) for _ in text)


def symbols(text: str, rng: random.Random) -> str:
    return "".join(rng.choice("}{)(;:/\\'\"|<>~^*&%$#@!?") for _ in text)


@pytest.mark.parametrize("garble", [loop, broken_bytes, soup, symbols])
@pytest.mark.parametrize("language", TEXTS)
def test_garbage_is_found_in_every_language_and_from_the_step_on_at_which_it_began(
    language: str, garble: Callable[[str, random.Random], str]
) -> None:
    def said(step: int, rng: random.Random) -> list[str]:
        own = [healthy(TEXTS[language], rng) for _ in range(6)]
        return own if step < 7 else [garble(TEXTS[language], rng) if n < 5 else text for n, text in enumerate(own)]

    (diagnosis,) = found(course(said))
    assert diagnosis.serious
    assert diagnosis.text.startswith("the policy's answers are garbled from step 8 on: ")
    assert "--from RUN@7" in diagnosis.text
    assert diagnosis.steps == (8, 13)


@pytest.mark.parametrize("language", TEXTS)
def test_no_language_and_no_format_is_garbage(language: str) -> None:
    assert found(course(lambda step, rng: [healthy(TEXTS[language], rng) for _ in range(6)])) == []


def test_what_a_small_model_said_while_it_learned_is_no_garbage() -> None:
    def said(step: int, rng: random.Random) -> list[str]:
        first = SMOL[: max(3, len(SMOL) - step)]
        return [*rng.choices(first, k=8), *[f"{rng.randrange(99)} + {rng.randrange(99)} - {step}"] * step]

    assert found(course(said)) == []


def test_another_language_or_format_that_is_learned_is_no_garbage() -> None:
    for before, after in (("english", "chinese"), ("english", "json"), ("german", "code"), ("thai", "markdown")):

        def said(step: int, rng: random.Random, before: str = before, after: str = after) -> list[str]:
            return [healthy(TEXTS[after if step > 6 else before], rng) for _ in range(6)]

        assert found(course(said)) == [], f"from {before} to {after}"


def test_a_run_that_always_repeats_itself_is_compared_with_its_own_start() -> None:
    assert found(course(lambda step, rng: [loop(TEXTS["english"], rng)] * 8)) == []
    assert found(course(lambda step, rng: [TEXTS["english"]] * 8, steps=8)) == [], "too short to say"


def test_what_goes_with_it_is_said() -> None:
    def said(step: int, rng: random.Random) -> list[str]:
        return [loop(TEXTS["german"], rng) if step > 6 else healthy(TEXTS["german"], rng) for _ in range(8)]

    (text,) = [
        each.text
        for each in found(course(said, truncated=lambda step: 0.6 if step > 6 else 0.01, reward=lambda _: 0.5))
    ]
    assert (
        "of the tokens are loops, the same words again and again (0% at first), and 60% of the trained calls end"
        in text
    )
    assert "the grader pays for such answers" in text
    (other,) = [each.text for each in found(course(said, reward=lambda step: 0.1 if step > 6 else 0.9))]
    assert "grader" not in other


def test_a_single_bad_step_and_bad_answers_now_and_then_are_no_alarm() -> None:
    def said(step: int, rng: random.Random) -> list[str]:
        return [
            loop(TEXTS["english"], rng) if rng.random() < 0.1 else healthy(TEXTS["english"], rng) for _ in range(16)
        ]

    assert found(course(said, steps=30)) == []
    once = course(lambda step, rng: [(loop if step == 11 else healthy)(TEXTS["english"], rng) for _ in range(8)])
    assert found(once) == []


# measures ----------------------------------------------------------------------------------------------------------------
def test_measures_of_single_answers() -> None:
    assert looped([1, 2, 3]) == 0.0
    assert looped(list(range(500))) == 0.0
    assert looped([1, 2, 3] * 100) == 1.0
    assert looped([*range(50), *[7, 8] * 25]) == 0.5
    assert looped([1, 2] * 5) == 0.0, "ten tokens are a short loop"
    assert looped([key for n in range(40) for key in (1, 2, 3, 900 + n, 4)]) == 0.0, "values differ in an array of JSON"
    assert characters("cut within a char\ufffd") == (0.0, 0.0, 0.0), "an answer that was cut off may end so"
    assert characters("a\ufffdb\x00")[0] == 0.5
    assert characters("日本語のテキスト")[1] == 0.0, "one language, three scripts"
    assert characters("aбaбaб")[1] == 1.0
    assert characters("46 + 20 - 11 = 55")[2] == 0.0
    assert characters("a }}}{{{(((")[2] > 0.7


def test_without_texts_loops_are_found_all_the_same() -> None:
    looked = look_at(answered([loop(TEXTS["english"], random.Random(1))], recorded=False))
    assert looked.metrics.keys() == {"looped"}
    assert looked.metrics["looped"] > 0.8
    assert look_at([]).metrics == {}


def test_a_large_step_costs_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [Group(f"g{n}", answered([TEXTS["english"]] * 4, n)[0].trajectories) for n in range(4)]
    size = len(groups[0].trajectories[0].transitions[0].response_ids) + 2
    monkeypatch.setattr(module, "MOST_TOKENS", 6 * size)
    looked = look_at(groups)
    assert list(looked.rollouts) == ["r/0/0/0", "r/1/0/0", "r/2/0/0", "r/3/0/0", "r/0/0/1", "r/1/0/1"], (
        "from all groups"
    )
    monkeypatch.setattr(module, "MOST_TOKENS", 1)
    assert len(look_at(groups).rollouts) == 1


def test_the_worst_rollouts_stand_with_the_finding() -> None:
    texts = [TEXTS["english"], loop(TEXTS["english"], random.Random(1)), TEXTS["german"]]
    looked = look_at(answered(texts))
    steps = [{"advice/looped": 0.0}] * 9 + [looked.recorded]
    assert with_examples(Diagnosis(GARBLED, "x"), looked, steps).rollouts == ("r/0/0/1",)
    assert with_examples(Diagnosis("flat", "x"), looked, steps).rollouts == ()


# a recorded run ------------------------------------------------------------------------------------------------------------
class Garbles(Maker):
    """A policy whose answers become a loop after eight steps."""

    turns = 8

    def answer(self, task: Any, right: bool, count: int, cut: bool) -> str:
        words = [f"word{self.rng.integers(5000)}" for _ in range(40)]
        return " ".join(words if self.taken < self.turns else words[:2] * 20)

    taken = 0

    async def step(self, step: int) -> None:
        self.taken = step - 1
        await super().step(step)


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = MemoryStore()
    await made.open()
    yield made
    await made.close()


async def test_advice_on_a_recorded_run_says_the_same_with_rollouts_to_read(store: MemoryStore) -> None:
    plot = Plot(
        "g", lambda step: State(), 1, steps=14, tasks=20, held_out=4, tasks_per_step=3, group_size=4, eval_every=99
    )
    await Garbles(store, plot).write()
    alarms = {each.found.cause: each for each in (await advise(store, "g")).alarms}
    said = alarms[GARBLED]
    assert said.found.text.startswith("the policy's answers are garbled from step 9 on: ")
    assert said.still
    assert len(said.found.rollouts) == 3
    assert all(each.startswith("g/14/") for each in said.found.rollouts)

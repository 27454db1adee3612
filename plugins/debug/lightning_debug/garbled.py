"""Measures of answers that became garbage, and the rule that finds them: loops, unreadable characters, mixed scripts, symbols.

The invariant: an answer is compared only with the answers of the run's own beginning, in the same measures, so that a policy
that answers in Thai, in JSON or in code is not garbled. A step costs a bounded time, however many and long its answers are.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from lightning.batch import Group, Trajectory
from lightning.errors import StoreError
from lightning.types import Transition
from lightning_record import exchanges

from lightning_debug.diagnosis import WINDOW, Course, Diagnosis, change_of, known_of, last_steps, mean_of, values_of
from lightning_debug.transcript import text_of, tool_calls_of

MEASURED: Final = "advice/"
"""The beginning of the measures' names among the metrics of a step: that of the stage which adds them."""
PERIOD: Final = 128
"""Most tokens of the part that a loop repeats."""
TIMES: Final = 3
"""A part that stands so often in a row is a loop, if that are at least `LEAST` tokens: an array of JSON or a table is none."""
LEAST: Final = 12
RUN: Final = 4
"""Consecutive characters that are no letter, digit or space and count as a run of symbols."""
MOST_TOKENS: Final = 400_000
"""Tokens of prompts and answers of a step whose calls are looked at; rollouts are taken evenly from all groups."""
LONGEST: Final = 4_000
"""Tokens, and characters, of one answer that are looked at: the last ones, because loops come late."""
SURE: Final = 4.0
"""Standard errors by which the last steps must exceed the first ones."""
EXAMPLES: Final = 3
"""Rollouts that an alarm names."""
GARBLED: Final = "garbled"
"""The cause of this finding."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure of garbage, from 0 to 1: its `name` among the metrics, in words what it is the share of, and by how much it
    must rise to count; it must also become three times as large."""

    name: str
    words: str
    rise: float


LOOPED: Final = Measure("looped", "of the tokens are loops, the same words again and again", 0.2)
UNREADABLE: Final = Measure("unreadable", "of the characters cannot be read", 0.01)
MIXED: Final = Measure("mixed_scripts", "of the letters are followed by one of another script", 0.05)
SYMBOLS: Final = Measure("symbol_runs", "of the characters stand in runs of symbols", 0.3)
MEASURES: Final = (LOOPED, UNREADABLE, MIXED, SYMBOLS)


def measures_of(call: Transition, text: str | None) -> dict[str, float]:
    """Return the measures of one answer by the name of the metric. Without its text (None) only the measure of tokens is
    there."""
    found = {LOOPED.name: looped(call.response_ids[-LONGEST:])}
    if text:
        found |= zip((each.name for each in MEASURES[1:]), characters(text[-LONGEST:]), strict=True)
    return found


def _means(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each measure over the answers that have it."""
    names = {name: None for each in answers for name in each}
    return {name: mean_of([each[name] for each in answers if name in each]) for name in names}


def looped(ids: Sequence[int]) -> float:
    """Return the share of an answer's tokens that its longest loop has: a part of at most `PERIOD` tokens that stands `TIMES`
    times in a row or more. 0 for an answer without one."""
    tokens = np.asarray(ids, dtype=np.int64)
    longest = 0
    for period in range(1, min(PERIOD, len(tokens) // TIMES) + 1):
        differ = tokens[period:] != tokens[:-period]
        if len(differ) - np.count_nonzero(differ) < (TIMES - 1) * period:
            continue
        breaks = np.flatnonzero(differ)
        edges = np.concatenate(([-1], breaks, [len(tokens) - period]))
        run = int(np.diff(edges).max()) - 1
        if run >= (TIMES - 1) * period:
            longest = max(longest, run + period)
    return longest / len(tokens) if longest >= LEAST else 0.0


def characters(text: str) -> tuple[float, float, float]:
    """Return the shares of unreadable characters, of letters followed by one of another script, and of characters in runs of
    symbols, of a text that is not empty."""
    whole = text.rstrip("\ufffd")  # an answer that was cut off may end within a character
    unreadable = sum(_is_unreadable(each) for each in whole) / len(text)
    scripts = [script for each in whole if (script := _script(each))]
    mixed = sum(one != other for one, other in pairwise(scripts)) / max(1, len(scripts) - 1)
    run = symbols = 0
    for each in f"{whole} ":
        if each.isalnum() or each.isspace() or unicodedata.category(each).startswith("M"):
            symbols += run if run >= RUN else 0
            run = 0
        else:
            run += 1
    return unreadable, mixed, symbols / len(text)


@functools.lru_cache(maxsize=4096)
def _is_unreadable(character: str) -> bool:
    """Return whether a character stands for broken bytes, or is a control character or none that a language has."""
    return character == "\ufffd" or (
        unicodedata.category(character) in ("Cc", "Co", "Cn", "Cs") and character not in "\n\r\t"
    )


ONE_SCRIPT: Final = {
    "HIRAGANA": "CJK",
    "KATAKANA": "CJK",
    "KATAKANA-HIRAGANA": "CJK",
    "HALFWIDTH": "CJK",
    "BOPOMOFO": "CJK",
}
"""Scripts that one language writes together."""
NO_SCRIPT: Final = frozenset(
    {
        "MODIFIER",
        "MATHEMATICAL",
        "DOUBLE-STRUCK",
        "SCRIPT",
        "MICRO",
        "OHM",
        "FULLWIDTH",
        "FEMININE",
        "MASCULINE",
        "SUPERSCRIPT",
    }
)
"""First words of the names of letters that are signs in any script."""


@functools.lru_cache(maxsize=4096)
def _script(character: str) -> str:
    """Return the script of a letter by its Unicode name; empty for anything else."""
    if not character.isalpha():
        return ""
    first = unicodedata.name(character, "").partition(" ")[0]
    return "" if first in NO_SCRIPT else ONE_SCRIPT.get(first, first)


# a step ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Looked:
    """The measures of a step's answers as metrics, and by rollout those of its own answers."""

    metrics: Mapping[str, float]
    rollouts: Mapping[str, Mapping[str, float]]

    @property
    def recorded(self) -> dict[str, float]:
        """The metrics under the names that they have in the step's record."""
        return {f"{MEASURED}{name}": value for name, value in self.metrics.items()}

    def worst(self, measure: str) -> tuple[str, ...]:
        """The rollouts with the most of a measure, the worst first."""
        ordered = sorted(self.rollouts, key=lambda each: -self.rollouts[each].get(measure, 0.0))
        return tuple(each for each in ordered[:EXAMPLES] if self.rollouts[each].get(measure))


def look_at(groups: Sequence[Group]) -> Looked:
    """Measure the answers of a step's rollouts, as many as `MOST_TOKENS` allow, at least one rollout."""
    answers: list[dict[str, float]] = []
    rollouts: dict[str, Mapping[str, float]] = {}
    left = MOST_TOKENS
    for member in _evenly(groups):
        left -= sum(len(call.prompt_ids) + len(call.response_ids) for call in member.transitions)
        if left < 0 and answers:
            break
        own = [call for call in member.transitions if len(call.response_ids)]
        found = [measures_of(call, text) for call, text in zip(own, _texts(member, own), strict=True)]
        rollouts[member.rollout.id] = _means(found)
        answers += found
    return Looked(_means(answers), rollouts)


def _evenly(groups: Sequence[Group]) -> Iterator[Trajectory]:
    """Yield the first rollout of each group, then the second ones, and so on."""
    for place in range(max((len(group.trajectories) for group in groups), default=0)):
        yield from (group.trajectories[place] for group in groups if place < len(group.trajectories))


def _texts(member: Trajectory, calls: Sequence[Transition]) -> list[str | None]:
    """Return the recorded text of each answer with its tool calls; None where it is not recorded or cannot be read."""
    every = sorted((*member.transitions, *member.refused, *member.lost), key=lambda call: call.seq)
    try:
        read = dict(zip((call.seq for call in every), exchanges.read(every, exchanges.parent_of(member)), strict=True))
    except StoreError:
        return [None] * len(calls)
    found: list[str | None] = []
    for call in calls:
        exchange = read[call.seq]
        reply = None if exchange is None else exchange.reply
        said = [text_of(reply), *(str(made) for made in tool_calls_of(reply))] if reply is not None else []
        found.append(" ".join(filter(None, said)) or None)
    return found


# the course of a run -----------------------------------------------------------------------------------------------------
def garbled(course: Course) -> Iterator[Diagnosis]:
    """Find answers that became garbage: one of the measures has risen far above that of the run's first steps."""
    risen = []
    for measure in MEASURES:
        change = change_of(values_of(course, MEASURED + measure.name))
        if change is None:
            continue
        early, late, errors = change
        if late >= max(early + measure.rise, 3 * early) and errors >= SURE:
            risen.append((late - early, measure, early, late))
    if not risen:
        return
    _, worst, early, late = max(risen, key=lambda each: each[0] / each[1].rise)
    begun = _since(course, worst, (early + late) / 2)
    said = ", ".join(f"{now:.0%} {each.words} ({then:.0%} at first)" for _, each, then, now in risen)
    yield Diagnosis(
        GARBLED,
        f"the policy's answers are garbled from step {begun} on: {said}{_endless(course)}. Read one of the rollouts"
        f"{_paid(course)}. Lower engine.lr, or raise the algorithm's kl_coefficient; a new run can begin before it: --from "
        f"RUN@{begun - 1}",
        serious=True,
        steps=tuple(dict.fromkeys((begun, *last_steps(course, 1)))),
    )


def with_examples(found: Diagnosis, looked: Looked, steps: Sequence[Mapping[str, float]]) -> Diagnosis:
    """Return a finding with the worst rollouts of the last step if it is about garbled answers; any other as it is. `looked` is
    of that step, and `steps` are the metrics of all steps up to it."""
    if found.cause != GARBLED:
        return found

    def risen(measure: Measure) -> float:
        name = MEASURED + measure.name
        then = [each[name] for each in steps[:WINDOW] if name in each]
        return (looked.metrics.get(measure.name, 0.0) - (mean_of(then) if then else 0.0)) / measure.rise

    return replace(found, rollouts=looked.worst(max(MEASURES, key=risen).name))


def _since(course: Course, measure: Measure, middle: float) -> int:
    """Return the first step behind the first window in which a measure is above `middle`, as it is in the step after it."""
    known = known_of(course, MEASURED + measure.name)[WINDOW:]
    values = [value for _, value in known]
    above = (step for place, (step, _) in enumerate(known) if min(values[place : place + 2]) >= middle)
    return next(above, known[-1][0])


def _endless(course: Course) -> str:
    """Say how many answers never end, if these became many more."""
    change = change_of(values_of(course, "truncated"))
    if change is None or change[1] < change[0] + 0.1:
        return ""
    return f", and {change[1]:.0%} of the trained calls end at the limit of tokens ({change[0]:.0%} at first)"


def _paid(course: Course) -> str:
    """Say that the reward pays for it, if the reward has not fallen meanwhile."""
    change = change_of(values_of(course, "reward_with_failures", "reward"))
    paid = change is not None and change[1] >= change[0]
    return ": the reward did not fall, so that the grader pays for such answers; mend it first" if paid else ""

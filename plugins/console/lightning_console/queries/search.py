"""Search the texts of a run: find the rollouts that have a text, and the places where it stands.

The invariant: a search looks at texts that a scan keeps in memory, never at the store. It finds a text wherever it stands in
another, in any script, without regard to case. One that takes longer than `SECONDS` stops and says after how many texts.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lightning.types import Status, by_key

from lightning_console.pages.words import mean_of
from lightning_console.queries.conversation import one_line
from lightning_console.queries.scan import KINDS, Kind, Scan, Scanned
from lightning_console.queries.tool_stats import RewardBeside, reward_beside

SECONDS: Final = 0.7
"""Seconds after which a search stops."""
LOOKS: Final = 512
"""How many texts are looked at between two looks at the clock."""
AROUND: Final = 70
"""Most characters that are shown before and after a hit."""
BLOCK: Final = 4096
"""How many characters are passed over at once before a hit, where characters are longer without case."""
WHOLE: Final = 300
"""Most characters of an answer that is shown without a search for a text."""
HITS: Final = 3
"""Most hits of one rollout that are shown."""


@dataclass(frozen=True, slots=True)
class Query:
    """A search: the `text` (empty: any rollout that fits the rest), where it may stand (empty: anywhere), and which rollouts
    are wanted. `above` and `below` bound the reward, both included; `failed` and `cut_off` (an answer ended at the limit of
    tokens) and `odd` (a tool call could not run) are None for any rollout. A cancelled rollout is neither one that failed nor
    one that did not."""

    text: str = ""
    where: str = ""
    above: float | None = None
    below: float | None = None
    failed: bool | None = None
    step: int | None = None
    split: str = ""
    cut_off: bool | None = None
    odd: bool | None = None

    def takes(self, rollout: Scanned) -> bool:
        """Return whether a rollout is one of those that are wanted."""
        reward = rollout.reward
        return (
            self.split in ("", rollout.split)
            and self.step in (None, rollout.step)
            and (self.failed is None or rollout.status is not Status.CANCELLED)
            and self.failed in (None, rollout.status is Status.FAILED)
            and self.cut_off in (None, bool(rollout.cut_off))
            and self.odd in (None, bool(rollout.odd))
            and (self.above is None or (reward is not None and reward >= self.above))
            and (self.below is None or (reward is not None and reward <= self.below))
        )


@dataclass(frozen=True, slots=True)
class Hit:
    """A place at which the text stands: the kind of text and the number of its call (0 for none), with the text around it."""

    kind: Kind
    call: int
    before: str
    found: str
    after: str


@dataclass(frozen=True, slots=True)
class Match:
    """A rollout that has the text, with its first hits; `texts` counts its texts that have it."""

    rollout: Scanned
    texts: int
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The parts of a run in which some rollouts are: their number by split and step, in the order of the steps. `earned` is
    their mean reward, `others` that of the other rollouts of these parts, each part counted as often as it has some of them;
    None if there is none with a reward."""

    parts: tuple[tuple[str, int, int], ...]
    earned: float | None
    others: float | None


@dataclass(frozen=True, slots=True)
class Results:
    """One page of a search: the matches from number `first` on, of `matched` rollouts among the `wanted` ones. `looked` of
    `texts` texts were looked at; fewer if the search had to stop. `beside` compares the rewards of the rollouts with the text
    and without it; None without a text. `whereabouts` are those of all matches."""

    matches: tuple[Match, ...]
    first: int
    matched: int
    wanted: int
    looked: int
    texts: int
    beside: RewardBeside | None
    whereabouts: Whereabouts


def search(scan: Scan, query: Query, first: int, limit: int) -> Results:
    """Return the matches of a query from number `first` on, at most `limit`, in the order of the rollouts' creation."""
    rollouts = [each for each in list(scan.rollouts.values()) if query.takes(each)]
    if not query.text:
        matches = [_shown(scan, each, query) for each in rollouts[first : first + limit]]
        there = whereabouts(scan, rollouts)
        return Results(tuple(matches), first, len(rollouts), len(rollouts), 0, 0, None, there)
    wanted = folded_of(query.text)
    numbers, looked = _having(scan, wanted)
    found = [
        each for each in rollouts if not numbers.isdisjoint(each.marks[::3]) and any(_marks(each, numbers, query.where))
    ]
    matches = [
        _match(scan, each, list(_marks(each, numbers, query.where)), wanted) for each in found[first : first + limit]
    ]
    beside = reward_beside(rollouts, {each.id for each in found})
    there = whereabouts(scan, found)
    return Results(tuple(matches), first, len(found), len(rollouts), looked, len(scan.texts), beside, there)


def whereabouts(scan: Scan, found: Sequence[Scanned]) -> Whereabouts:
    """Return where in the run some rollouts are, and what they and the others there earned. Branches, and rollouts that have
    not ended or were lost to the infrastructure, have no part in the rewards."""
    mine = {each.id for each in found}
    parts = by_key(sorted(found, key=lambda each: (each.step, each.split)), lambda each: (each.split, each.step))
    every = by_key(list(scan.rollouts.values()), lambda each: (each.split, each.step))
    others = []
    for part, own in parts.items():
        beside = mean_of([each.score for each in every[part] if each.id not in mine and not each.is_branch])
        others += [beside] * len(own)
    earned = mean_of([each.score for each in found if not each.is_branch])
    return Whereabouts(tuple((*part, len(own)) for part, own in parts.items()), earned, mean_of(others))


def _shown(scan: Scan, rollout: Scanned, query: Query) -> Match:
    """Return a rollout of a search without a text, with the answers that its filters are about: those that were cut off, and
    those with a tool call that could not run."""
    marks = rollout.marks
    said = {marks[at + 2]: scan.texts[marks[at]] for at in range(0, len(marks), 3) if KINDS[marks[at + 1]] == "answer"}
    found = [(call, said.get(call, "")) for call in rollout.cut_off if query.cut_off]
    found += [(each.call, each.detail) for each in rollout.odd if query.odd]
    hits = [Hit("answer", call, one_line(text, WHOLE), "", "") for call, text in found]
    return Match(rollout, len(hits), tuple(hits[:HITS]))


def folded_of(text: str) -> str:
    """Return a text in the form in which texts are compared: composed characters, without case."""
    return unicodedata.normalize("NFC", text).casefold()


def _having(scan: Scan, wanted: str) -> tuple[set[int], int]:
    """Return the numbers of the texts that have `wanted`, and how many texts were looked at."""
    until, plain = time.monotonic() + SECONDS, wanted.isascii()
    texts, folded = scan.texts, scan.folded
    found: set[int] = set()
    for start in range(0, len(texts), LOOKS):
        if time.monotonic() > until:
            return found, start
        for number in range(start, min(start + LOOKS, len(texts))):
            other = folded[number]
            if wanted in other if other else plain and wanted in texts[number].casefold():
                found.add(number)
    return found, len(texts)


def _marks(rollout: Scanned, numbers: set[int], where: str) -> Iterator[tuple[int, Kind, int]]:
    """Yield the texts of a rollout that are among `numbers`: number, kind, and number of the call."""
    marks = rollout.marks
    for at in range(0, len(marks), 3):
        if marks[at] in numbers and where in ("", KINDS[marks[at + 1]]):
            yield marks[at], KINDS[marks[at + 1]], marks[at + 2]


def _match(scan: Scan, rollout: Scanned, marks: Sequence[tuple[int, Kind, int]], wanted: str) -> Match:
    hits = [Hit(kind, call, *around(scan.texts[number], wanted)) for number, kind, call in marks[:HITS]]
    return Match(rollout, len(marks), tuple(hits))


def around(text: str, wanted: str) -> tuple[str, str, str]:
    """Return the first place of `wanted` (folded) in a text: the text before it, the place itself, and the text behind it."""
    folded = text.casefold()
    start = folded.find(wanted)
    stop = start + len(wanted)
    if len(folded) != len(text):  # some characters are longer without case, as ß is
        start, stop = _place(text, start, stop)
    before, after = text[max(0, start - AROUND) : start], text[stop : stop + AROUND]
    cut_before, cut_after = "…" if start > AROUND else "", "…" if stop + AROUND < len(text) else ""
    return cut_before + " ".join(before.split()), text[start:stop], " ".join(after.split()) + cut_after


def _place(text: str, start: int, stop: int) -> tuple[int, int]:
    """Return the place in a text of the place from `start` to `stop` in the folded text."""
    at = begin = 0
    while begin < len(text) and at + (size := len(text[begin : begin + BLOCK].casefold())) <= start:
        begin, at = begin + BLOCK, at + size
    first = begin
    for number, character in enumerate(text[begin:], begin):
        if at <= start:
            first = number
        if at >= stop:
            return first, number
        at += len(character.casefold())
    return first, len(text)

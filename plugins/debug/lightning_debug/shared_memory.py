"""Finds what one rollout has answered in a prompt of another: rollouts that share a memory.

The invariant: only token ids are compared, and only what no prompt held before it was said counts. So neither a system prompt,
a task, a document that is quoted, nor equal answers to equal prompts are taken for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from lightning.types import TokenIds, Transition

LENGTH: Final = 20
"""Tokens in a row that two texts do not share by chance."""
MOST_ROLLOUTS: Final = 64
"""Rollouts of a wave that are looked at: what they share they share early."""
FACTORS: Final = np.random.default_rng(12).integers(1, 2**63, LENGTH, dtype=np.uint64) | np.uint64(1)
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Said:
    """Where some tokens in a row were said first."""

    at: float
    speaker: int
    call: Transition


def shared_answers(rollouts: Sequence[Sequence[Transition]]) -> dict[int, int]:
    """The rollouts with a prompt that holds what another one had answered before, each with that other one, by position.

    `rollouts` are the calls of each, answered or not. Before a rollout has an answer nothing in its prompts is its own. Later
    only plain text of rollouts with another task counts, since a template writes a rollout's own tool calls anew, maybe as
    another one has written them.
    """
    answered = [[call for call in calls if call.status.answered] for calls in rollouts[:MOST_ROLLOUTS]]
    if sum(map(bool, answered)) < 2:
        return {}
    prompts = [(who, call, _hashes(call.prompt_ids)) for who, calls in enumerate(answered) for call in calls]
    said, own = _spoken(answered, np.unique(np.concatenate([hashes for _, _, hashes in prompts])))
    firsts = [min((call.ended_at for call in calls), default=0.0) for calls in answered]
    held, holders = _held(prompts, said, firsts)
    found: dict[int, int] = {}
    for number, spoken in said.items():
        if number not in held or held[number] < spoken.at:
            continue
        for who, first in holders[number]:
            if who == spoken.speaker:
                continue
            same_task = answered[who][0].prompt_ids == answered[spoken.speaker][0].prompt_ids
            if first or not (spoken.call.tool_calls or same_task or number in own[who]):
                found.setdefault(who, spoken.speaker)
    return found


def _spoken(answered: Sequence[Sequence[Transition]], seen: Hashes) -> tuple[dict[int, _Said], list[set[int]]]:
    """What of the answers stands in any prompt: who said it first, and what each rollout said."""
    said: dict[int, _Said] = {}
    own: list[set[int]] = [set() for _ in answered]
    for who, calls in enumerate(answered):
        for call in calls:
            hashes = _hashes(call.response_ids)
            for number in hashes[np.isin(hashes, seen)].tolist():
                own[who].add(number)
                if number not in said or call.ended_at < said[number].at:
                    said[number] = _Said(call.ended_at, who, call)
    return said, own


def _held(
    prompts: Sequence[tuple[int, Transition, Hashes]], said: dict[int, _Said], firsts: Sequence[float]
) -> tuple[dict[int, float], dict[int, set[tuple[int, bool]]]]:
    """Since when a prompt has held each of what was said; and whose prompts do, and whether before their first answer."""
    held: dict[int, float] = {}
    holders: dict[int, set[tuple[int, bool]]] = {}
    wanted = np.fromiter(said, dtype=np.uint64, count=len(said))
    for who, call, hashes in prompts:
        for number in hashes[np.isin(hashes, wanted)].tolist():
            held[number] = min(held.get(number, call.started_at), call.started_at)
            holders.setdefault(number, set()).add((who, call.started_at < firsts[who]))
    return held, holders


def _hashes(ids: TokenIds) -> Hashes:
    """One number for each `LENGTH` tokens in a row."""
    tokens = np.asarray(ids, dtype=np.int64).astype(np.uint64) + np.uint64(1)
    if len(tokens) < LENGTH:
        return np.empty(0, dtype=np.uint64)
    rows = np.lib.stride_tricks.sliding_window_view(tokens, LENGTH)
    mixed: Hashes = (rows * FACTORS).sum(axis=1, dtype=np.uint64)
    return mixed ^ (mixed >> np.uint64(29))

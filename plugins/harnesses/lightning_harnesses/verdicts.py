"""Whether the agent went on with the answer of a call, as the later calls of the attempt show.

The invariant: answers and prompts are compared as token ids, never as text. An answer was accepted if a later call has it in
its prompt; it was rejected if the same agent, or another call of the same rule, went on without it. If neither happened it is
unknown, and the call is trained as any other.

No prompt has the reasoning of an answer, which may be most of it. So a long run of an answer is enough, whatever its share.
Each call's windows are hashed once, and the time is linear in the calls of a rule but for comparisons of times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from lightning.types import TokenIds, Transition

WINDOW: Final = 8
"""Tokens in a row that are compared."""
SHORTEST: Final = 3
"""The least tokens of an answer that can be found again."""
SHARE: Final = 0.25
"""The share of an answer's windows that a prompt must have, for answers without a `RUN`. Programs cut frames and drafts off a
summary, and a rejected summary has some words in common with what the agent does later."""
RUN: Final = 16
"""As many windows in a row, which are 23 tokens, show that a prompt has the answer, whatever else the answer has."""
NEXT: Final = 32
"""The later calls that are looked at: an agent goes on with a summary at once, beside others that may call meanwhile."""

Hashes = npt.NDArray[np.uint64]


def verdicts(calls: Sequence[Transition], of_rule: Mapping[str, str]) -> dict[str, bool]:
    """Return, by call id, whether the answers of some calls were accepted (True) or rejected (False); it is unknown of ids
    that are missing. `of_rule` gives the rule of these calls by id; `calls` are all calls of the attempt, by `seq`."""
    found = {}
    windows = _Windows(calls, of_rule)
    by_id = defaultdict[str, list[int]](list)
    for place, call in enumerate(calls):
        by_id[call.id].append(place)
    for name, rule in of_rule.items():
        own = [place for place in by_id[name] if calls[place].status.answered]
        if own:
            after = max(calls[place].ended_at for place in own)
            later = [
                place
                for place, call in enumerate(calls)
                if call.started_at >= after and call.id != name and len(call.prompt_ids)
            ]
            others = [place for place in later if of_rule.get(calls[place].id) != rule]
            verdict = _is_in(own, rule, others[:NEXT], windows)
            agent = calls[own[0]].caller.name
            went_on = len(others) < len(later) or any(calls[place].caller.name == agent for place in others)
            if verdict or (verdict is False and went_on):
                found[name] = verdict
    return found


class _Windows:
    """The windows of an attempt's calls as sorted hashes, each once. `size` is a window's number of tokens."""

    def __init__(self, calls: Sequence[Transition], of_rule: Mapping[str, str]) -> None:
        self.calls, self._of_rule = calls, of_rule
        self._repeated: dict[tuple[str, int], Hashes] = {}
        # Calls are asked for in order, `NEXT` at a time.
        self.of_prompt = lru_cache(maxsize=2 * NEXT)(lambda place, size: _sorted(calls[place].prompt_ids, size))
        self.of_answer = lru_cache(maxsize=2 * NEXT)(lambda place, size: _sorted(calls[place].response_ids, size))

    def repeated(self, rule: str, size: int) -> Hashes:
        """Return what the answers of several calls of a rule have. Choices of one call count as one."""
        if (rule, size) not in self._repeated:
            answers = defaultdict[str, list[Hashes]](list)
            for call in self.calls:
                if self._of_rule.get(call.id) == rule:
                    answers[call.id].append(_windows(call.response_ids, size))
            each = [np.unique(np.concatenate(choices)) for choices in answers.values()]
            values, counts = np.unique(np.concatenate(each), return_counts=True)
            self._repeated[rule, size] = values[counts > 1]
        return self._repeated[rule, size]


def _is_in(own: Sequence[int], rule: str, others: Sequence[int], windows: _Windows) -> bool | None:
    """Return whether a later prompt has an answer of the call; None for answers that are too short, or have nothing that is
    neither in their prompt nor in an answer of another call of the rule: two summaries of one history have much in common."""
    wanted = []
    for place in own:
        answer = windows.calls[place].response_ids[:-1]  # the last token often ends the turn, and is in no prompt
        size = min(WINDOW, len(answer))
        if size >= SHORTEST:
            parts = _windows(answer, size)
            new = ~(_among(parts, windows.of_prompt(place, size)) | _among(parts, windows.repeated(rule, size)))
            wanted += [(size, parts, new, SHARE * new.sum())] if new.any() else []
    if not wanted:
        return None
    for place in others:
        for size, parts, new, share in wanted:
            if _has(_among(parts, windows.of_prompt(place, size)), new, share):
                return True
            new &= ~_among(parts, windows.of_answer(place, size))  # later prompts may have it from this call
    return False


def _has(there: npt.NDArray[np.bool_], new: npt.NDArray[np.bool_], share: float) -> bool:
    """Return whether a prompt has an answer of which the windows `there` are in the prompt. Only `new` windows count, of which
    `share` are enough; the others do not end a run."""
    hits = there & new
    return bool(hits.any()) and bool(hits.sum() >= share or np.bincount(np.cumsum(~there)[hits]).max() >= RUN)


def _among(parts: Hashes, known: Hashes) -> npt.NDArray[np.bool_]:
    """Return which parts are among the known ones, which are sorted."""
    if not len(known):
        return np.zeros(len(parts), dtype=np.bool_)
    found: npt.NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, parts), len(known) - 1)] == parts
    return found


def _sorted(ids: TokenIds, size: int) -> Hashes:
    return np.unique(_windows(ids, size))


def _windows(ids: TokenIds, size: int) -> Hashes:
    """Return a hash of each `size` ids in a row, shape (len(ids) - size + 1,)."""
    values = np.asarray(ids, dtype=np.uint64)
    count = max(0, len(values) - size + 1)
    found = np.zeros(count, dtype=np.uint64)
    for place in range(size):
        found = found * np.uint64(0x9E3779B97F4A7C15) + values[place : place + count] + np.uint64(1)
    return found

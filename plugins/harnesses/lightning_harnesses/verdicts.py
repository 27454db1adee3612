"""Whether the agent went on with the answer of a call, as the later calls of the attempt show.

The invariant: answers and prompts are compared as token ids, never as text. An answer was accepted if a later call has it in
its prompt; it was rejected if the same agent, or another call of the same rule, went on without it. If neither happened it is
unknown, and the call is trained as any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from lightning.types import TokenIds, Transition

WINDOW: Final = 8
"""Tokens in a row that are compared."""
SHORTEST: Final = 3
"""The least tokens of an answer that can be found again."""
SHARE: Final = 0.25
"""The share of an answer's windows that a prompt must have. Programs cut frames and drafts off a summary, and a rejected
summary has some words in common with what the agent does later."""
NEXT: Final = 32
"""The later calls that are looked at: an agent goes on with a summary at once, beside others that may call meanwhile."""

Hashes = npt.NDArray[np.uint64]


def verdicts(calls: Sequence[Transition], of_rule: Mapping[str, str]) -> dict[str, bool]:
    """Return, by call id, whether the answers of some calls were accepted (True) or rejected (False); it is unknown of ids
    that are missing. `of_rule` gives the rule of these calls by id; `calls` are all calls of the attempt, by `seq`."""
    found = {}
    for name, rule in of_rule.items():
        own = [call for call in calls if call.id == name and call.status.answered]
        if own:
            after = max(call.ended_at for call in own)
            later = [call for call in calls if call.started_at >= after and call.id != name and len(call.prompt_ids)]
            others = [call for call in later if of_rule.get(call.id) != rule]
            rivals = [call for call in calls if of_rule.get(call.id) == rule and call.id != name]
            verdict = _is_in(own, rivals, others[:NEXT])
            went_on = len(others) < len(later) or any(call.caller.name == own[0].caller.name for call in others)
            if verdict or (verdict is False and went_on):
                found[name] = verdict
    return found


def _is_in(own: Sequence[Transition], rivals: Sequence[Transition], others: Iterable[Transition]) -> bool | None:
    """Return whether a later prompt has an answer of the call; None for answers that are too short, or have nothing that is
    neither in their prompt nor in an answer of their `rivals`: two summaries of one history have much in common."""
    wanted = []
    for call in own:
        answer = call.response_ids[:-1]  # the last token often ends the turn, and is in no prompt
        size = min(WINDOW, len(answer))
        if size >= SHORTEST:
            known = [_windows(call.prompt_ids, size), *(_windows(each.response_ids, size) for each in rivals)]
            parts = np.setdiff1d(_windows(answer, size), np.concatenate(known))
            wanted += [(size, parts)] if len(parts) else []
    if not wanted:
        return None
    return any(
        np.isin(parts, _windows(each.prompt_ids, size)).mean() >= SHARE for each in others for size, parts in wanted
    )


def _windows(ids: TokenIds, size: int) -> Hashes:
    """Return a hash of each `size` ids in a row, shape (len(ids) - size + 1,)."""
    values = np.asarray(ids, dtype=np.uint64)
    count = max(0, len(values) - size + 1)
    found = np.zeros(count, dtype=np.uint64)
    for place in range(size):
        found = found * np.uint64(0x9E3779B97F4A7C15) + values[place : place + count] + np.uint64(1)
    return found

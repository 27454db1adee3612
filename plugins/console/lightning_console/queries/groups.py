"""A group as a tree: sibling rollouts as one prefix tree of calls.

The invariant: two calls are one node exactly when the calls before them are, and their prompts and answers are the same token
ids from the same agent. (`lightning.batch.radix` has the tree of tokens, whose nodes end inside of answers, and credit's states
meet again after they have parted: neither has calls as nodes.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lightning.errors import DataError
from lightning.store.protocol import Attempt
from lightning.trainer.reasons import reason
from lightning.types import Rollout, Run, Transition

from lightning_console.places import Located
from lightning_console.queries.finding import group_of, may_change, neighbours, why_no_calls
from lightning_console.queries.proof import StepProof, prove
from lightning_console.queries.said import Said, said_by
from lightning_console.queries.tokens import Vocabulary, vocabulary_of

MOST_NODES: Final = 1_500
"""Calls of a tree that are shown: those nearest to the root."""
MOST_MEMBERS: Final = 512
LONGEST_ACTION: Final = 200
LONGEST_CONTINUATION: Final = 20_000
"""Characters."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a group. `total` is its return, None where it has none; `advantage` the mean over its trained calls."""

    rollout: Rollout
    calls: tuple[Transition, ...]
    total: float | None
    advantage: float | None
    error: str = ""

    @property
    def tokens(self) -> int:
        """Sampled tokens of all calls."""
        return sum(len(call.response_ids) for call in self.calls)


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A call, at which `members` (places in the group) were; the root, before any call, has `depth` -1. `value` is the mean
    return of those that have one, `advantage` the mean over those that were trained. `ends` are the members that end here."""

    parent: int
    depth: int
    members: tuple[int, ...]
    value: float | None
    advantage: float | None = None
    caller: str = ""
    action: str = ""
    seq: int = -1
    children: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group. `left_out` counts calls that are not among `nodes`, `more` rollouts that are not among `members`; `before` and
    `after` are the groups beside it, empty where there is none; `empty` says why there is no call."""

    run: Run
    id: str
    members: tuple[Member, ...]
    nodes: tuple[TreeNode, ...]
    proof: StepProof
    left_out: int = 0
    more: int = 0
    before: str = ""
    after: str = ""
    live: bool = False
    empty: str = ""
    texts: str = ""
    _said: Mapping[int, Sequence[Said]] = field(default_factory=dict, repr=False)

    def last_answer(self, place: int) -> str:
        """The beginning of what the last call of a member answered; empty where that is not known."""
        said = self._said.get(place, ())
        return _shortened(said[-1].answer) if said else ""

    def continuation(self, node: int) -> tuple[str, Member]:
        """What followed from a node on, as a text, in the best of the rollouts that came by, and that rollout."""
        place = max(self.nodes[node].members, key=lambda each: (_or_least(self.members[each].total), -each))
        member, parts = self.members[place], []
        for call, said in zip(member.calls, self._said[place], strict=True):
            parts.append(f"[{call.caller.name}]\n{said.answer}")
        text = "\n\n".join(parts[max(0, self.nodes[node].depth) :])
        if len(text) > LONGEST_CONTINUATION:
            text = f"{text[:LONGEST_CONTINUATION]}\n… ({len(text) - LONGEST_CONTINUATION} characters more)"
        return text, member


async def group_view(located: Located, group: str) -> GroupView:
    """A group of a run. Raises `DataError` for one that the run has not."""
    everyone = await group_of(located, group)
    rollouts = everyone[:MOST_MEMBERS]
    store = located.store
    names = [(each.id, each.attempt) for each in rollouts]
    calls, ended = await store.transitions_of(names), await store.attempts_of(names)
    proof = await prove(store, located.run, _looked_at(rollouts))
    members = [_member(*each, proof) for each in zip(rollouts, calls, ended, strict=True)]
    vocabulary = vocabulary_of(located)
    said = {place: said_by(member.calls, vocabulary) for place, member in enumerate(members)}
    nodes, left_out = _tree(members, said, proof)
    beside, _ = await neighbours(located, rollouts[0], proof.record)
    here = beside.index(group) if group in beside else -1
    return GroupView(
        located.run,
        group,
        tuple(members),
        nodes,
        proof,
        left_out,
        len(everyone) - len(rollouts),
        beside[here - 1] if here > 0 else "",
        beside[here + 1] if 0 <= here < len(beside) - 1 else "",
        await may_change(store, everyone),
        "" if any(calls) else await why_no_calls(store, rollouts[0]),
        _why_no_texts(said, vocabulary),
        said,
    )


def _looked_at(rollouts: Sequence[Rollout]) -> Rollout:
    return next((each for each in rollouts if each.trained_at_step is not None), rollouts[0])


def _why_no_texts(said: Mapping[int, Sequence[Said]], vocabulary: Vocabulary) -> str:
    missing = next((each.missing for calls in said.values() for each in calls if not each.reply and each.missing), "")
    return f"{missing}; {vocabulary.missing}" if missing and vocabulary.missing else missing


def _member(rollout: Rollout, calls: Sequence[Transition], ended: Attempt, proof: StepProof) -> Member:
    credit = proof.members.get(rollout.id)
    if credit is not None:
        total: float | None = credit.total
    else:
        total = None if rollout.reward is None else rollout.reward + sum(each.value for each in ended.step_rewards)
    values = [each.advantage for each in credit.calls.values()] if credit else []
    error = str(reason(rollout.error)) if rollout.error else ""
    return Member(rollout, tuple(calls), total, _mean(values), error)


def _tree(
    members: Sequence[Member], said: Mapping[int, Sequence[Said]], proof: StepProof
) -> tuple[tuple[TreeNode, ...], int]:
    """The nodes level by level, and how many calls are left out."""
    everyone = tuple(range(len(members)))
    nodes = [TreeNode(-1, -1, everyone, _mean([members[place].total for place in everyone]))]
    children: dict[int, list[int]] = {0: []}
    at = dict.fromkeys(everyone, 0)
    left_out = depth = 0
    while going := [place for place in everyone if at[place] >= 0 and depth < len(members[place].calls)]:
        found: dict[tuple[int, str, bytes, bytes], list[int]] = {}
        for place in going:
            call = members[place].calls[depth]
            key = at[place], call.caller.name, call.prompt_ids.tobytes(), call.response_ids.tobytes()
            found.setdefault(key, []).append(place)
        for (parent, caller, _, _), visitors in found.items():
            if len(nodes) >= MOST_NODES:
                left_out += sum(len(members[place].calls) - depth for place in visitors)
                at |= dict.fromkeys(visitors, -1)
                continue
            call = members[visitors[0]].calls[depth]
            given = [
                credit.calls[members[place].calls[depth].seq].advantage
                for place in visitors
                if (credit := proof.members.get(members[place].rollout.id)) is not None
                and members[place].calls[depth].seq in credit.calls
            ]
            value = _mean([members[place].total for place in visitors])
            action = _shortened(said[visitors[0]][depth].answer) or f"({call.finish_reason or call.status})"
            children[parent].append(len(nodes))
            children[len(nodes)] = []
            at |= dict.fromkeys(visitors, len(nodes))
            nodes.append(TreeNode(parent, depth, tuple(visitors), value, _mean(given), caller, action, call.seq))
        depth += 1
    ends: dict[int, list[int]] = {}
    for place, node in at.items():
        ends.setdefault(node, []).append(place)
    return tuple(_whole(number, node, children, ends) for number, node in enumerate(nodes)), left_out


def _whole(number: int, node: TreeNode, children: Mapping[int, list[int]], ends: Mapping[int, list[int]]) -> TreeNode:
    return replace(node, children=tuple(children[number]), ends=tuple(ends.get(number, ())))


def split_of(view: GroupView, node: int) -> tuple[int, ...]:
    """The children of a node where continuations part, the best first. Raises `DataError` for a node at which none do."""
    children = view.nodes[node].children if 0 <= node < len(view.nodes) else ()
    if len(children) < 2:
        raise DataError(f"nothing parts at node {node} of this group")
    return tuple(sorted(children, key=lambda each: (-_or_least(view.nodes[each].value), each)))


def _or_least(value: float | None) -> float:
    return -math.inf if value is None else value


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_ACTION else f"{text[:LONGEST_ACTION]}…"

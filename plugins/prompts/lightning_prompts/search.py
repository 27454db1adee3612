"""The beam search of APO, round by round.

The invariant: it decides by what the bench tells it and by the seed alone, so a search that is begun again after a kill
takes the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from lightning.errors import OptimizerError, RunnerError
from lightning.types import Fault, Json, Rollout, Task

from lightning_prompts.critique import Example, ask_for_criticism, ask_for_edit, shown
from lightning_prompts.protocol import Bench, BudgetSpentError, Trial
from lightning_prompts.selection import Scores, Selection
from lightning_prompts.templates import edited_prompt, refusal

if TYPE_CHECKING:
    from lightning_resources.nouns import Resource

    from lightning_prompts.apo import APO

logger = logging.getLogger(__name__)

LONGEST_CRITICISM = 2000
"""Characters of a criticism that are kept with the candidate it led to."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """What one question for an edit gave: a template, or the reason why there is none."""

    parent: int
    text: str = ""
    criticism: str = ""
    reason: str = ""
    error: str = ""


class Search:
    """One run of APO. `_prompts` has every prompt in the order of its discovery, the starting one first."""

    def __init__(self, apo: APO, bench: Bench) -> None:
        self._apo, self._bench = apo, bench
        self._prompts: dict[int, Resource] = {bench.start.version: bench.start}
        self._train, self._held_out = Scores(), Scores()
        self._earned: list[float] = []
        self._ended = 0

    async def execute(self) -> Resource:
        """See `APO.tune`."""
        start = self._bench.start.version
        spent = await self._evaluate([start], 0)
        if spent is not None:
            raise RunnerError(
                f"version {start} of the prompt, from which the search starts, cannot be measured: {spent}, since the "
                "infrastructure has lost what was run. Resume the run with a larger max_rollouts"
            )
        if not self._held_out.rewards.get(start):
            raise RunnerError(
                f"version {start} of the prompt, from which the search starts, earned no reward on any held-out task: the "
                "agent failed on each (lightning runs show RUN --failed), so there is nothing to compare with"
            )
        await self._bench.report(0, self._metrics(), f"held-out reward of the starting prompt: {self._value(start)}")
        beam = [start]
        for number in range(1, self._apo.rounds + 1):
            try:
                beam = await self._round(number, beam)
            except BudgetSpentError as spent:
                line = f"round {number} of {self._apo.rounds} is the last: {spent}"
                await self._bench.report(number, self._metrics(), line)
                break
        return self._prompts[self._best()]

    async def _round(self, number: int, beam: Sequence[int]) -> list[int]:
        """Criticise and edit the beam, select the new one, run it on the held-out tasks."""
        self._earned, self._ended = [], 0
        seen = await self._run(
            beam, self._tasks(f"{number}/criticised", self._apo.minibatch), f"{number}/criticised", number
        )
        candidates, refused = await self._expand(number, beam, seen)
        selection = Selection(
            self._apo.selection,
            self._train,
            [*beam, *candidates],
            self._apo.beam_width,
            self._apo.selection_rollouts,
            self._apo.minibatch,
            self._apo.exploration,
        )
        spent: BudgetSpentError | None = None
        try:
            for turn, draw in enumerate(selection.draws()):
                key = f"{number}/draw{turn}"
                await self._run(draw.versions, self._tasks(key, draw.tasks), key, number)
        except BudgetSpentError as error:
            spent = error
        chosen = selection.best()
        spent = await self._evaluate(chosen, number) or spent
        rewards = self._earned
        metrics = self._metrics() | {
            "candidates": float(len(candidates)),
            **{f"refused/{reason}": float(count) for reason, count in refused.items()},
            **({"reward": sum(rewards) / len(rewards)} if rewards else {}),
            **({"reward_with_failures": sum(rewards) / self._ended} if self._ended else {}),
        }
        await self._bench.report(number, metrics, self._line(number, candidates, refused))
        if spent is not None:
            raise spent
        return chosen

    async def _run(
        self, versions: Sequence[int], tasks: Sequence[Task], key: str, number: int
    ) -> dict[int, list[Rollout]]:
        """Run prompts on training tasks and note what they earned; one held-out evaluation stays affordable."""
        trials = [Trial(version, tasks, key, "train", number) for version in versions]
        found = dict(zip(versions, await self._bench.run(trials, reserve=len(self._bench.val)), strict=True))
        for version, rollouts in found.items():
            _note(self._train, version, rollouts)
            self._earned += [rollout.reward for rollout in rollouts if rollout.reward is not None]
            self._ended += len(rollouts)
        return found

    async def _evaluate(self, versions: Sequence[int], number: int) -> BudgetSpentError | None:
        """Run those prompts on the held-out tasks that have not been, all at once, or the best ones if not all fit into the
        budget; then the error that says so is returned."""
        fresh = [version for version in versions if not self._held_out.count(version)]
        if not fresh:
            return None
        try:
            await self._hold_out(fresh, number)
        except BudgetSpentError as spent:
            for version in fresh:
                try:
                    await self._hold_out([version], number)
                except BudgetSpentError:
                    break
            return spent
        return None

    async def _hold_out(self, versions: Sequence[int], number: int) -> None:
        split = "val" if number == 0 else "candidates"
        trials = [Trial(version, self._bench.val, "val", split, number) for version in versions]
        for version, rollouts in zip(versions, await self._bench.run(trials), strict=True):
            _note(self._held_out, version, rollouts)

    async def _expand(
        self, number: int, beam: Sequence[int], seen: Mapping[int, Sequence[Rollout]]
    ) -> tuple[list[int], Counter[str]]:
        """The new candidates of a round, and how many drafts were refused for which reason."""
        kept = await self._bench.recall(f"round/{number}")
        if isinstance(kept, Mapping):
            known = kept["candidates"]
            assert isinstance(known, Sequence), "it was remembered below"
            for version in known:
                assert isinstance(version, int), "it was remembered below"
                self._prompts[version] = await self._bench.get(version)
            return [int(str(version)) for version in known], Counter(_counts(kept["refused"]))
        drafts = await self._drafts(number, beam, seen)
        candidates: list[int] = []
        refused = Counter(draft.reason for draft in drafts if draft.reason)
        for draft in drafts:
            if draft.reason:
                continue
            made: dict[str, Json] = {"parent": draft.parent, "round": number, "criticism": draft.criticism}
            resource = await self._bench.keep(draft.text, made)
            if resource.version in self._prompts:
                refused["duplicate"] += 1
                continue
            self._prompts[resource.version] = resource
            candidates.append(resource.version)
        remembered: dict[str, Json] = {"candidates": list(candidates), "refused": dict(refused)}
        await self._bench.remember(f"round/{number}", remembered)
        return candidates, refused

    async def _drafts(self, number: int, beam: Sequence[int], seen: Mapping[int, Sequence[Rollout]]) -> list[_Draft]:
        asked = [
            self._draft(number, version, branch, seen[version])
            for version in beam
            for branch in range(self._apo.branch_factor)
        ]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, BaseException):
                raise outcome
        drafts = [draft for draft in ended if isinstance(draft, _Draft)]
        silent = [draft for draft in drafts if draft.reason == "no_answer"]
        if silent:
            logger.warning("round %d: %d edits are dropped; the last: %s", number, len(silent), silent[-1].error)
        if len(silent) == len(drafts):
            raise OptimizerError(
                f"round {number}: no question was answered. {silent[-1].error}. Nothing is lost: resume the run when it answers"
            )
        return drafts

    async def _draft(self, number: int, parent: int, branch: int, rollouts: Sequence[Rollout]) -> _Draft:
        """One criticism of a prompt and the edit against it."""
        key, bench = f"{number}/{parent}/{branch}", self._bench
        counted = [rollout for rollout in rollouts if rollout.fault is not Fault.INFRASTRUCTURE]
        chosen = shown(counted, self._apo.shown, Random(f"{bench.seed}/{key}"))  # noqa: S311 — a sample, not a secret
        examples = [Example(rollout, await bench.transcript(rollout)) for rollout in chosen]
        text = str(self._prompts[parent].content)
        component = self._apo.component or bench.start.name
        try:
            criticism = await bench.ask(f"{key}/criticism", ask_for_criticism(component, text, examples))
            if not criticism.strip():
                return _Draft(parent, reason="empty")
            answer = await bench.ask(f"{key}/edit", ask_for_edit(component, text, criticism, examples))
        except OptimizerError as error:
            return _Draft(parent, reason="no_answer", error=str(error))
        edited = edited_prompt(answer)
        if edited is None:
            return _Draft(parent, reason="no_prompt" if answer.strip() else "empty")
        reason = refusal(text, edited, longest=self._apo.longest_prompt)
        return _Draft(parent, edited, criticism[:LONGEST_CRITICISM], reason)

    def _tasks(self, what: str, count: int) -> list[Task]:
        """Some training tasks, each as often as any other."""
        random = Random(f"{self._bench.seed}/{what}")  # noqa: S311 — a sample, not a secret
        tasks: list[Task] = []
        while len(tasks) < count:
            tasks += random.sample(list(self._bench.train), min(len(self._bench.train), count - len(tasks)))
        return tasks

    def _best(self) -> int:
        return self._held_out.ranked(list(self._prompts))[0]

    def _metrics(self) -> dict[str, float]:
        value = self._held_out.value(self._best())
        return {} if value is None else {"eval/reward": value, "best": float(self._best())}

    def _value(self, version: int) -> str:
        value = self._held_out.value(version)
        return "-" if value is None else f"{value:.3f}"

    def _line(self, number: int, candidates: Sequence[int], refused: Mapping[str, int]) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items()))
        return (
            f"round {number} of {self._apo.rounds}: {len(candidates)} candidates{f' ({dropped})' if dropped else ''}; "
            f"held-out reward of the best, version {self._best()}: {self._value(self._best())} "
            f"(start: {self._value(self._bench.start.version)})"
        )


def _note(scores: Scores, version: int, rollouts: Sequence[Rollout]) -> None:
    """What the infrastructure lost is nobody's doing and does not count."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    failures = sum(rollout.reward is None and rollout.fault is not Fault.INFRASTRUCTURE for rollout in rollouts)
    scores.add(version, rewards, failures)


def _counts(value: Json) -> dict[str, int]:
    return {reason: int(str(count)) for reason, count in value.items()} if isinstance(value, Mapping) else {}

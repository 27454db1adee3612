"""APO: automatic prompt optimisation by textual gradients, beam search and a bandit.

The invariant: the prompt that goes live is the one with the highest held-out reward, the earlier one among equals. A candidate
that the agent's code could not fill in is never run. An unusable answer of the optimiser model only drops a candidate. The
search depends only on the bench's results and the seed, so that a search that is started again after a kill repeats its steps.

The method is ProTeGi (arXiv 2305.03495), as in Agent Lightning's own APO (arXiv 2508.03680). In each round every prompt of the
beam is run on a few training tasks; a model criticises it by the results and edits it, several times; a bandit finds the best
of the old and new prompts with few rollouts; the new beam is run on the held-out tasks. ProTeGi's paraphrases of each edit are
left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from random import Random
from typing import TYPE_CHECKING, get_args

from lightning.config import refuses_unknown
from lightning.errors import ConfigError, OptimizerError, RunnerError
from lightning.types import Fault, Json, Rollout, Task

from lightning_prompts.algorithm import PromptAlgorithm
from lightning_prompts.critique import Example, ask_for_criticism, ask_for_edit, shown
from lightning_prompts.protocol import Bench, BudgetSpentError, OptimizerModel, Trial
from lightning_prompts.selection import Method, Scores, Selection
from lightning_prompts.templates import edited_prompt, refusal

if TYPE_CHECKING:
    from lightning_resources.nouns import Resource


@refuses_unknown
@dataclass(frozen=True, slots=True)
class APO(PromptAlgorithm):
    """Tunes the prompt template of one component of an agent; the weights stay as they are.

    `component` is the name of a `lightning.component(name, prompt=...)`; empty means the only one. The search begins with
    `prompt`, or else with the agent's present one, and keeps the best `beam_width` prompts over `rounds` rounds. In each round
    it runs them on `minibatch` tasks and edits each `branch_factor` times, on the basis of `shown` of these rollouts. The best
    are selected by `selection`, "ucb" or "successive_rejects", with at most `selection_rollouts` rollouts a round;
    `exploration` is the factor of UCB's bonus. `max_rollouts` bounds the whole run, held-out evaluations included. At the end
    `alias` is pointed to the best prompt.

    `optimizer` is the model that criticises and edits, at any OpenAI-compatible endpoint: `{"model": ..., "base_url": ...}`
    or an `OptimizerModel`; its key is in the environment (`api_key_env`, OPENAI_API_KEY). None means the model of the setting
    `optimizer_model`, or else the policy.

    Candidates are dropped, and counted by reason: no answer of the optimiser model (`no_answer`), no template in it
    (`no_prompt`), a template that cannot replace the old one (`empty`, `unchanged`, `too_long` beyond `longest_prompt`
    characters, `lost_placeholder`, `invented_placeholder`, `not_a_template`), or one that was tried before (`duplicate`).
    """

    component: str = ""
    _: KW_ONLY
    prompt: str | None = None
    optimizer: OptimizerModel | Mapping[str, str | float | int | None] | None = None
    beam_width: int = 4
    branch_factor: int = 4
    rounds: int = 3
    minibatch: int = 4
    shown: int = 4
    selection: Method = "ucb"
    selection_rollouts: int = 32
    exploration: float = 0.3
    max_rollouts: int | None = None
    longest_prompt: int = 20_000
    alias: str = "production"

    def __post_init__(self) -> None:
        for name in ("beam_width", "branch_factor", "rounds", "minibatch", "shown", "selection_rollouts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"APO({name}={getattr(self, name)}): it must be at least 1")
        if "/" in self.component or self.component != self.component.strip():
            raise ConfigError(
                f"APO(component={self.component!r}): give the name of one component, without / and spaces around"
            )
        if self.selection not in get_args(Method):
            raise ConfigError(f"APO(selection={self.selection!r}): use {' or '.join(get_args(Method))}")
        if self.exploration < 0:
            raise ConfigError(f"APO(exploration={self.exploration}): it must not be negative")
        if isinstance(self.optimizer, Mapping):
            object.__setattr__(self, "optimizer", _model(self.optimizer))

    @property
    def name(self) -> str:
        """The registered name from which this algorithm is made again with its fields."""
        return "apo"

    @property
    def optimizer_model(self) -> OptimizerModel | None:
        """The model that criticises and edits; None means that of the setting `optimizer_model`, or else the policy."""
        return self.optimizer if isinstance(self.optimizer, OptimizerModel) else None

    async def tune(self, bench: Bench) -> Resource:
        """Search, and return the best prompt found, which may be the starting one.

        Raises `RunnerError` if no rollout of the starting prompt is scored, `OptimizerError` if the optimiser model answered
        nothing in a whole round.
        """
        return await Search(self, bench).execute()


def _model(given: Mapping[str, str | float | int | None]) -> OptimizerModel:
    try:
        return OptimizerModel(**given)  # type: ignore[arg-type]  # a wrong name is told below, a wrong type by what uses it
    except TypeError as error:
        known = ", ".join(field.name for field in fields(OptimizerModel))
        raise ConfigError(
            f"APO(optimizer=...) has {', '.join(map(str, given)) or 'nothing'}: give model and base_url, and of {known} what "
            "you like; a key stays in the environment"
        ) from error


logger = logging.getLogger(__name__)

LONGEST_CRITICISM = 2000
"""Most characters of a criticism that are kept with its candidate."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """The result of one edit: a template, or the reason why there is none (the name of a refusal, and the error's text)."""

    parent: int
    text: str = ""
    criticism: str = ""
    reason: str = ""
    error: str = ""


class Search:
    """One search of APO. `_prompts` has every prompt by version, in the order of discovery, the starting one first."""

    def __init__(self, apo: APO, bench: Bench) -> None:
        self._apo, self._bench = apo, bench
        self._prompts: dict[int, Resource] = {bench.start.version: bench.start}
        self._train, self._held_out = Scores(), Scores()
        self._earned: list[float] = []
        self._ended = 0

    async def execute(self) -> Resource:
        """Search, and return the best prompt found. Raises as `APO.tune` does."""
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
        """Do one round: run the beam, criticise and edit it, select the new beam, and run that on the held-out tasks. Return
        the new beam. Raises `BudgetSpentError` after the report if the budget ended in the round."""
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
        """Run prompts on training tasks and note their rewards. The budget for one held-out evaluation is kept in reserve."""
        trials = [Trial(version, tasks, key, "train", number) for version in versions]
        found = dict(zip(versions, await self._bench.run(trials, reserve=len(self._bench.val)), strict=True))
        for version, rollouts in found.items():
            _note(self._train, version, rollouts)
            self._earned += [rollout.reward for rollout in rollouts if rollout.reward is not None]
            self._ended += len(rollouts)
        return found

    async def _evaluate(self, versions: Sequence[int], number: int) -> BudgetSpentError | None:
        """Run the prompts without held-out results on the held-out tasks, all at once. If the budget is too small for all, run
        as many as fit, the first ones, and return the error."""
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
        """Return the new candidates of a round, and the number of refused drafts by reason. A round that was remembered is not
        made again."""
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
        """Ask for one criticism of a prompt and for an edit that cures it."""
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
        """Sample `count` training tasks with a seed that follows from `what`. No task repeats before all others were taken."""
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
    """Add the results of a prompt's rollouts to `scores`. Rollouts that infrastructure lost do not count."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    failures = sum(rollout.reward is None and rollout.fault is not Fault.INFRASTRUCTURE for rollout in rollouts)
    scores.add(version, rewards, failures)


def _counts(value: Json) -> dict[str, int]:
    return {reason: int(str(count)) for reason, count in value.items()} if isinstance(value, Mapping) else {}

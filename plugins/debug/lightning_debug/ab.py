"""Two variants on the same tasks, in pairs, until they are told apart: what `lightning ab` runs.

The invariant: a pair is one rollout of each variant with the same task, place and seed; each task is one difference, taken in a
random order that follows from the seed. What the infrastructure lost is no difference; any other failure is the lowest reward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning.cli.locate import with_store
from lightning.errors import ConfigError
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.run_server import of_project
from lightning.trainer.summary import Reporter
from lightning.types import Fault, Json, Rollout, Task, by_key
from lightning_branching.divergence import first_difference
from lightning_branching.prompt_texts import longest_literal, texts_in
from lightning_record import exchanges
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import put_resource, set_alias
from lightning_resources.weights import WEIGHTS_NAME, weights_content

from lightning_debug.evaluate import Setup, Variant, check_any_scored, evaluating, faults_of
from lightning_debug.statistics import SequentialTest
from lightning_debug.transcript import text_of, tool_calls_of, with_numbered_ids

AT_ONCE: Final = 16
"""Rollouts of each variant between two looks, where both share a vLLM; at most what runs at once."""
BLOCKS: Final = 4
"""Looks at two models, which are served one after the other: each look costs a start of vLLM."""
SHOWN: Final = 120
"""Characters of an answer that are shown."""


@dataclass(frozen=True, slots=True)
class PairedTask:
    """A task under both variants: the mean reward of each over the pairs that count, and the rollouts of the pair in which B is
    worst beside A. `difference` is B less A."""

    task: str
    a: float
    b: float
    rollout_a: str
    rollout_b: str

    @property
    def difference(self) -> float:
        """B less A."""
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class DivergentCall:
    """The first call that is another under B: the `number`-th under A, made by `caller`. `where` is a place in the request, or
    `answer`, or `calls` where one of both made no such call."""

    number: int
    caller: str
    where: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What an A/B has shown. `difference` is the mean over tasks of B's reward less A's, its `interval` holds at any time;
    `better` is "A", "B", or empty where they were not told apart. `planned` is what a test without early stopping runs."""

    a: str
    b: str
    difference: float
    interval: tuple[float, float]
    p_value: float
    better: str
    mean_a: float
    mean_b: float
    tasks: int
    rollouts: int
    planned: int
    failed: Mapping[str, Mapping[str, int]]
    lost_pairs: int
    bounds: tuple[float, float]
    regressions: tuple[tuple[PairedTask, DivergentCall | None], ...]


def shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The tasks in the order in which they are compared: random, since a file may have the easy ones first."""
    order = list(tasks)
    random.Random(f"{seed}/ab").shuffle(order)  # noqa: S311 — an order, not a secret
    return order


async def compare(
    setup: Setup,
    a: Variant,
    b: Variant,
    *,
    bounds: tuple[float, float],
    most: int | None = None,
    batch: int | None = None,
    limit: int = 5,
    reporter: Reporter,
) -> Comparison:
    """Run both until they differ beyond doubt, at most on all tasks or with `most` rollouts in all.

    `batch` is how many tasks there are between two looks, `limit` how many regressions are told. Raises `ConfigError` for a
    prompt that the agent never asked for and for rewards outside the bounds, `RunnerError` where every rollout fails.
    """
    total = len(setup.tasks) if most is None else min(len(setup.tasks), most // (2 * setup.n))
    if not total:
        raise ConfigError(f"--max-rollouts {most} is less than one task takes, which is {2 * setup.n}")
    test, paired, lost = SequentialTest(bounds[0] - bounds[1], bounds[1] - bounds[0]), list[PairedTask](), 0
    every: dict[str, list[Rollout]] = {a.run: [], b.run: []}
    order, done, asked = [a, b], 0, _Asked(a, b, reporter)
    async with evaluating(setup, [a, b], reporter) as evaluator:
        while done < total and not test.decided:
            count = min(batch or _batch(setup, a, b, total), total - done)
            new = {each.run: await evaluator.run(each, done, count) for each in order}
            order.reverse()  # who was served last goes first: one start of vLLM less, and neither is always the later one
            if not done:
                check_any_scored(f"{a.run} and {b.run}", [*new[a.run], *new[b.run]])
            await asked.look(evaluator.store, new)
            for run, rollouts in new.items():
                every[run] += rollouts
            _check_bounds([*new[a.run], *new[b.run]], bounds)
            found = [*paired_tasks(new[a.run], new[b.run], setup.n, bounds[0])]
            paired += [each for each, _ in found if each is not None]
            lost += sum(gone for _, gone in found)
            test.add([_within(each.difference, test) for each, _ in found if each is not None])
            done += count
            said = "{:+.3f}, from {:+.3f} to {:+.3f}".format(test.mean, *test.interval)
            reporter.say(f"after {done} tasks: B - A = {said}")
        asked.check()
        regressions = await _regressions(evaluator.store, paired, limit)
    means = [sum(getattr(each, name) for each in paired) / max(len(paired), 1) for name in ("a", "b")]
    return Comparison(
        a=a.label,
        b=b.label,
        difference=test.mean,
        interval=test.interval,
        p_value=test.p_value,
        better={1: "B", -1: "A", 0: ""}[test.decided],
        mean_a=means[0],
        mean_b=means[1],
        tasks=len(paired),
        rollouts=sum(map(len, every.values())),
        planned=2 * setup.n * total,
        failed={name: faults_of(every[each.run]) for name, each in (("A", a), ("B", b))},
        lost_pairs=lost,
        bounds=bounds,
        regressions=regressions,
    )


def _within(difference: float, test: SequentialTest) -> float:
    """A difference of two means within their bounds, which may be beyond them by rounding."""
    return min(max(difference, test.low), test.high)


async def _regressions(
    store: Store, paired: Sequence[PairedTask], limit: int
) -> tuple[tuple[PairedTask, DivergentCall | None], ...]:
    worse = sorted((each for each in paired if each.difference < 0), key=lambda each: each.difference)
    return tuple([(each, await divergent_call(store, each.rollout_a, each.rollout_b)) for each in worse[:limit]])


def _batch(setup: Setup, a: Variant, b: Variant, total: int) -> int:
    if a.model.folder != b.model.folder:
        return max(1, -(-total // BLOCKS))
    return max(1, min(AT_ONCE, a.config.runner.concurrency) // setup.n)


def _check_bounds(rollouts: Sequence[Rollout], bounds: tuple[float, float]) -> None:
    for rollout in rollouts:
        if rollout.reward is not None and not bounds[0] <= rollout.reward <= bounds[1]:
            raise ConfigError(
                f"the reward {rollout.reward:g} of {rollout.id} is outside {bounds[0]:g} to {bounds[1]:g}, and the test is for "
                "bounded rewards alone: say what they can be (--bounds LOW,HIGH; with --resume nothing runs again)"
            )


def paired_tasks(
    a: Sequence[Rollout], b: Sequence[Rollout], n: int, lowest: float
) -> Iterator[tuple[PairedTask | None, int]]:
    """Each task, and how many of its pairs are lost; None where all are. Both lists have n rollouts for each task, in order."""

    def value(rollout: Rollout) -> float | None:
        if rollout.reward is not None:
            return rollout.reward
        return None if rollout.fault is Fault.INFRASTRUCTURE else lowest

    for first in range(0, len(a), n):
        pairs = [
            (one, other, before, now)
            for one, other in zip(a[first : first + n], b[first : first + n], strict=True)
            if (before := value(one)) is not None and (now := value(other)) is not None
        ]
        if not pairs:
            yield None, n
            continue
        worst_a, worst_b, _, _ = min(pairs, key=lambda pair: pair[3] - pair[2])
        mean_a = math.fsum(pair[2] for pair in pairs) / len(pairs)
        mean_b = math.fsum(pair[3] for pair in pairs) / len(pairs)
        yield PairedTask(a[first].task.id, mean_a, mean_b, worst_a.id, worst_b.id), n - len(pairs)


async def divergent_call(store: Store, a: str, b: str, store_of_b: Store | None = None) -> DivergentCall | None:
    """The first call, by who made it and in which order, where two rollouts differ in the request or in the answer; None where
    none does. Both are in `store`, unless B has its own."""
    ours, theirs = await _calls(store, a), await _calls(store_of_b or store, b)
    waiting = by_key(theirs, lambda call: call.caller)
    for number, call in enumerate(ours, 1):
        there = waiting.get(call.caller)
        if not there:
            return DivergentCall(number, call.caller, "calls", "this call", "no such call")
        other = there.pop(0)
        if differs := first_difference(call.request, other.request):
            return DivergentCall(number, call.caller, *differs)
        if call.ids != other.ids:
            return DivergentCall(number, call.caller, "answer", _shortened(call.text), _shortened(other.text))
    left = next((call for call in theirs if call in waiting[call.caller]), None)
    return None if left is None else DivergentCall(len(ours) + 1, left.caller, "calls", "no such call", "another call")


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What is compared of a call: its request, with made-up ids numbered; where requests are not recorded, that is the token
    ids of the prompt."""

    caller: str
    request: Mapping[str, Any]
    ids: Sequence[int]
    text: str


async def _calls(store: Store, rollout: str) -> list[_Call]:
    transitions = await store.transitions(rollout)
    made, numbers = [], dict[str, str]()
    for transition, exchange in zip(transitions, exchanges.read(transitions), strict=True):
        if transition.choice:
            continue
        said = with_numbered_ids(exchange.request, numbers) if exchange is not None else None
        request = said if isinstance(said, dict) else {"prompt": list(transition.prompt_ids)}
        reply = None if exchange is None else exchange.reply
        text = " ".join(filter(None, [text_of(reply), *map(str, tool_calls_of(reply))]))
        made.append(_Call(transition.caller.name, request, list(transition.response_ids), text))
    return made


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


class _Asked:
    """Whether a request has shown yet that the agent asks for the prompts that are compared; true where none are."""

    def __init__(self, a: Variant, b: Variant, reporter: Reporter) -> None:
        self._a, self._b, self._reporter = a, b, reporter
        self._shown, self._told = a.prompt is None or b.prompt is None, False
        name = a.prompt[0] if a.prompt else ""
        self._never = f"no request differs by the prompt {name!r}: the agent never asks for it"

    async def look(self, store: Store, rollouts: Mapping[str, Sequence[Rollout]]) -> None:
        """See a batch, and say once that nothing has shown it."""
        self._shown = self._shown or await self._is_in(store, rollouts)
        if not self._shown and not self._told:
            self._told = True
            self._reporter.say(f"so far {self._never}")

    def check(self) -> None:
        """Raise `ConfigError` where no batch has shown it."""
        if not self._shown:
            raise ConfigError(
                f"{self._never}. Is there a component of that name, with a prompt, and is its .prompt what the agent sends?"
            )

    async def _is_in(self, store: Store, rollouts: Mapping[str, Sequence[Rollout]]) -> bool:
        for one, other in zip(rollouts[self._a.run], rollouts[self._b.run], strict=True):
            differs = await divergent_call(store, one.id, other.id)
            if differs is not None and differs.where not in ("answer", "calls"):
                return True
            for variant, rollout in ((self._a, one), (self._b, other)):
                literal = longest_literal(variant.prompt[1] if variant.prompt else "")
                if literal and any(
                    literal in text for call in await _calls(store, rollout.id) for text in texts_in(call.request)
                ):
                    return True
        return False


async def promote(url: str, winner: Variant, alias: str, found: Comparison) -> str:
    """Make the winner's prompt, or its weights, the next version of its resource in a store, and point the alias to it.

    Returns what was done, in words. Content that a version already has adds no new one, and that version keeps its metadata:
    what made it is recorded only where the content is new to the store.
    """
    metadata: dict[str, Json] = {"made_by": "ab", "run": winner.run, "difference": found.difference}
    if winner.prompt is not None:
        resource = Resource(winner.prompt[0], winner.prompt[1], ResourceKind.PROMPT, metadata)
    else:
        resource = Resource(WEIGHTS_NAME, weights_content(winner.model.folder), ResourceKind.WEIGHTS, metadata)

    async def put(store: Store) -> int:
        seen = of_project(store, winner.config.trainer.project)
        stored = await put_resource(seen, resource)
        return (await set_alias(seen, stored.name, alias, stored.version)).version

    version = await with_store(url, put)
    return f"{resource.name}@{alias} is version {version} in {redacted(url)}"

"""The A/B test of `lightning ab`: run two variants on the same tasks, in pairs, until one is better beyond doubt.

The invariant: a pair is one rollout of each variant with the same task, index and seed. Each task gives one difference, in a
random order that follows from the seed. A pair that infrastructure lost counts nowhere; any other failed rollout counts as the
lowest reward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lightning.cli.output import with_store
from lightning.errors import ConfigError
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.agents import of_project, project_of
from lightning.trainer.summary import Reporter
from lightning.types import Fault, Json, Rollout, Status, Task, by_key
from lightning_branching.divergence import first_difference
from lightning_branching.prompt_texts import longest_literal, texts_in
from lightning_record import exchanges
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import put_resource, set_alias
from lightning_resources.weights import weights_content

from lightning_debug.evaluate import Setup, Variant, check_any_scored, evaluating, faults_of
from lightning_debug.statistics import SequentialTest
from lightning_debug.transcript import text_of, tool_calls_of, with_numbered_ids

AT_ONCE: Final = 16
"""Most rollouts of each variant between two tests of the result, if both share a vLLM; never more than run at once."""
BLOCKS: Final = 4
"""Number of tests of the result if the variants are two models: these are served in turn, and each test costs a vLLM start."""
SHOWN: Final = 120
"""Most characters of an answer that are shown."""


@dataclass(frozen=True, slots=True)
class PairedTask:
    """The result of a task: the mean reward of each variant over the pairs that count, and the two rollouts of the pair in
    which B is worst compared with A."""

    task: str
    a: float
    b: float
    rollout_a: str
    rollout_b: str

    @property
    def difference(self) -> float:
        """B's mean reward minus A's."""
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class DivergentCall:
    """The first call of `caller` that differs between two rollouts: call `number` of A's. `where` is a path in the request, or
    "answer", or "calls" if one of them did not make this call. `a` and `b` are the two values there."""

    number: int
    caller: str
    where: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of an A/B test. `difference` is the mean over tasks of B's reward minus A's; its `interval` is valid at any
    time. `better` is "A", "B", or empty if neither is. `planned` is the number of rollouts without early stopping. `failed`
    counts rollouts without a reward, by variant and fault."""

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
    """Return the tasks in random order, which follows from the seed: a file may have its easy tasks first."""
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
    """Run both variants until one is better beyond doubt, all tasks are done, or `most` rollouts are used up (None: no limit).

    `batch` is the number of tasks between two tests of the result, `limit` the number of regressions to return. Raises
    `ConfigError` for a prompt that the agent never asked for and for rewards outside `bounds`, `RunnerError` if every rollout
    of the first batch fails.
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
            order.reverse()  # the variant that ran last goes first: one vLLM start less, and neither is always second
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
            reporter.say(f"after {counted(done, 'task')}: B - A = {said}")
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
    """Clip a difference of two means to the bounds of the test, which rounding may exceed."""
    return min(max(difference, test.low), test.high)


async def _regressions(
    store: Store, paired: Sequence[PairedTask], limit: int
) -> tuple[tuple[PairedTask, DivergentCall | None], ...]:
    worse = sorted((each for each in paired if each.difference < 0), key=lambda each: each.difference)
    return tuple([(each, await divergent_call(store, each.rollout_a, each.rollout_b)) for each in worse[:limit]])


def _batch(setup: Setup, a: Variant, b: Variant, total: int) -> int:
    if not a.model.serves_as(b.model):
        return max(1, -(-total // BLOCKS))
    return max(1, min(AT_ONCE, a.config.runner.concurrency) // setup.n)


def _check_bounds(rollouts: Sequence[Rollout], bounds: tuple[float, float]) -> None:
    for rollout in rollouts:
        if rollout.reward is not None and not bounds[0] <= rollout.reward <= bounds[1]:
            raise ConfigError(
                f"the reward {rollout.reward:g} of {rollout.id} is outside {bounds[0]:g} to {bounds[1]:g}, and the test is for "
                "bounded rewards alone: say what they can be (--bounds LOW,HIGH; with --resume nothing runs again)"
            )


class Ended(Protocol):
    """The result of a rollout."""

    @property
    def status(self) -> Status:
        """Its state."""
        ...

    @property
    def fault(self) -> Fault | None:
        """Whose fault it was; None unless it failed."""
        ...

    @property
    def reward(self) -> float | None:
        """Its reward; None if it has none."""
        ...


def earned(rollout: Ended, lowest: float = 0.0) -> float | None:
    """Return the reward that counts for a rollout in comparisons: `lowest` if it failed. None if it has not ended, was
    cancelled, or was lost to the infrastructure, which says nothing of the policy: then it is left out."""
    if rollout.reward is not None:
        return rollout.reward
    return None if rollout.status is not Status.FAILED or (rollout.fault and rollout.fault.is_loss) else lowest


def paired_tasks(
    a: Sequence[Rollout], b: Sequence[Rollout], n: int, lowest: float
) -> Iterator[tuple[PairedTask | None, int]]:
    """Yield the result of each task (None if all its pairs are lost) and the number of its lost pairs. Both lists have `n`
    rollouts for each task, in the same order."""

    for first in range(0, len(a), n):
        pairs = [
            (one, other, before, now)
            for one, other in zip(a[first : first + n], b[first : first + n], strict=True)
            if (before := earned(one, lowest)) is not None and (now := earned(other, lowest)) is not None
        ]
        if not pairs:
            yield None, n
            continue
        worst_a, worst_b, _, _ = min(pairs, key=lambda pair: pair[3] - pair[2])
        mean_a = math.fsum(pair[2] for pair in pairs) / len(pairs)
        mean_b = math.fsum(pair[3] for pair in pairs) / len(pairs)
        yield PairedTask(a[first].task.id, mean_a, mean_b, worst_a.id, worst_b.id), n - len(pairs)


async def divergent_call(store: Store, a: str, b: str, store_of_b: Store | None = None) -> DivergentCall | None:
    """Find the first call in which two rollouts differ, in the request or the answer; None if none does. The n-th call of an
    agent in A is compared with its n-th in B. Both rollouts are in `store`, unless `store_of_b` is given."""
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
    """The part of a call that is compared: its request with random ids replaced by numbers, or the prompt's token ids if
    requests are not recorded; and the token `ids` of its answer."""

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
    """Checks that the agent really uses the two prompts that are compared: some request must differ by them, or have their
    text. Always passes if no prompts are compared."""

    def __init__(self, a: Variant, b: Variant, reporter: Reporter) -> None:
        self._a, self._b, self._reporter = a, b, reporter
        self._shown, self._told = a.prompt is None or b.prompt is None, False
        name = a.prompt[0] if a.prompt else ""
        self._never = f"no request differs by the prompt {name!r}: the agent never asks for it"

    async def look(self, store: Store, rollouts: Mapping[str, Sequence[Rollout]]) -> None:
        """Check a batch of rollouts, and say once if no request so far uses the prompts."""
        self._shown = self._shown or await self._is_in(store, rollouts)
        if not self._shown and not self._told:
            self._told = True
            self._reporter.say(f"so far {self._never}")

    def check(self) -> None:
        """Raise `ConfigError` if no request in any batch used the prompts."""
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
    """Store the winner's prompt, or its weights, as the next version of its resource, and point the alias to it.

    Returns a sentence that says what was done. If a version already has this content, none is added, and that version keeps its
    metadata.
    """
    metadata: dict[str, Json] = {"made_by": "ab", "run": winner.run, "difference": found.difference}
    if winner.prompt is not None:
        resource = Resource(winner.prompt[0], winner.prompt[1], ResourceKind.PROMPT, metadata)
    else:
        content = weights_content(winner.model.folder)
        resource = Resource(winner.model.weights, content, ResourceKind.WEIGHTS, metadata)

    async def put(store: Store) -> int:
        seen = of_project(store, project_of(winner.config))
        stored = await put_resource(seen, resource)
        return (await set_alias(seen, stored.name, alias, stored.version)).version

    version = await with_store(url, put)
    return f"{resource.name}@{alias} is version {version} in {redacted(url)}"

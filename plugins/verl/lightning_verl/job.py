"""The workers of one model and the engines that compute on them: one engine, or one for each policy with adapters on the model.

The invariant: workers do one thing after another, for one policy at a time. Workers that die are started again only where no
engine has moved past its last checkpoint, so that all policies go on from where each of them was.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from lightning.batch import Sample
from lightning.config import LoraConfig
from lightning.engines.loading import served_length
from lightning.engines.protocol import Opening
from lightning.engines.step import MORE_ROOM, SMALLER_ROWS
from lightning.errors import EngineError, WorkersLostError

from lightning_verl.config import VerlConfig
from lightning_verl.device import choose
from lightning_verl.megatron_settings import SHARING, shared_rows
from lightning_verl.state import Taken

if TYPE_CHECKING:
    from lightning.config import Config

    from lightning_verl.worker_group import Group

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened:
    """The arguments with which workers are started, also again. `learners` are those of each engine, in their order; `beside`
    are the adapters of all engines but the first, whose adapters the job's settings have."""

    model: Path
    vocab_size: int
    learners: Sequence[Opening]
    beside: Sequence[LoraConfig] = ()
    reference: Path | None = None
    """The teacher's folder; None without a teacher."""


class Member(Protocol):
    """An engine of a job, as the job sees it."""

    @property
    def taken(self) -> Taken:
        """The steps that it has taken."""

    @property
    def saved(self) -> tuple[Path, Taken] | None:
        """Its last checkpoint, and the steps that it had taken then; None without one."""

    def discard_gradient(self) -> None:
        """Forget the present gradient."""


class Job:
    """The workers that train one model, with the settings `config` of the first engine."""

    def __init__(self, config: Config) -> None:
        self._config, self.device = config, ""
        self.group: Group | None = None
        self.ranks: list[tuple[int, bool]] = []
        """For each rank its place among the data-parallel ranks, and whether it answers for that place."""
        self.turn = threading.Lock()
        """Held during a call and during a transfer, because weights may have to be sent to a restarted vLLM while a step is
        computed."""
        self.budget = config.engine.tokens_per_microbatch
        """Tokens of a micro-batch."""
        self._opened: Opened | None = None
        self._members: Sequence[Member] = ()
        self._chosen = 0
        """The member that the workers compute for."""
        self._own_cluster = False
        self._restarts, self._died_at = 0, 0
        self._longest = 0
        """Tokens of a rank's part of the longest row in the present call; micro-batches are never smaller. 0 outside a call."""
        self._sharing = shared_rows(config)

    def open(self, opened: Opened, members: Sequence[Member]) -> None:
        """Start the workers. Raises `EngineError` when they cannot be started, or `close` was called meanwhile."""
        self.device = choose(self._config.engine.device)
        self._opened, self._members = opened, members
        self._start()

    def close(self) -> None:
        """End the workers, and the cluster if it was started here. Idempotent."""
        self._opened = None  # first, or a call in another thread would start the ended workers again
        group, self.group = self.group, None
        self._end(group)

    def ready(self) -> Opened:
        """Return the arguments of `open`. Raises `EngineError` if the job is not open."""
        if self._opened is None:
            raise EngineError("the engine has no model: call open() first")
        return self._opened

    def again(self, call: Callable[[], T]) -> T:
        """Make a call when no other is under way, and return its result; see `until_done`."""
        with self.turn:
            return self.until_done(call)

    def until_done(self, call: Callable[[], T]) -> T:
        """Make a call and return its result. When workers die, they are started again and the call is repeated."""
        lost: WorkersLostError | None = None
        while True:
            try:
                if lost is not None:
                    self._revive(lost)
                return call()
            except WorkersLostError as error:
                lost = error

    def run(self, member: int, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Make the same call on every rank, for one member, and return the answers."""
        group = self._working(member)
        return group.run(method, [arguments] * group.size, **named)

    def dealt(
        self, member: int, method: str, samples: Sequence[Sample], *arguments: Any, **named: Any
    ) -> list[tuple[list[int], Any]]:
        """Call a method, for one member, with each place's rows. Return for each place the indices of its rows, and its
        answer."""
        places = max(place for place, _ in self.ranks) + 1
        hands = deal([len(sample) for sample in samples], places)
        count = max(len(hand) for hand in hands)
        shares = [share(samples, hand, count) for hand in hands]
        self._longest = math.ceil(max(len(sample) for sample in samples) / self._sharing)
        parts = [(shares[place], *arguments, max(self.budget, self._longest)) for place, _ in self.ranks]
        answers = self._working(member).run(method, parts, **named)
        self._longest = 0
        spoken = {place: answer for (place, speaks), answer in zip(self.ranks, answers, strict=True) if speaks}
        return [(hand, spoken[place]) for place, hand in enumerate(hands)]

    def _working(self, member: int) -> Group:
        """Return the workers, which compute for this member."""
        group = self.group
        if group is None:
            self.ready()
            raise EngineError("the workers of the verl engine have not been started: call open() again")
        if member != self._chosen:
            group.run("choose", [(member,)] * group.size)
            self._chosen = member
        return group

    def _start(self, *, again: bool = False) -> None:
        from lightning_verl.settings import refuse_holes, teacher_config, worker_config
        from lightning_verl.worker_group import Alone, OnRay, connect

        opened, engine = self.ready(), self._config.engine
        first = opened.learners[0]
        made = worker_config(self._config, opened.model, first.optimizer, seed=first.seed, device=self.device)
        teacher = opened.reference and teacher_config(self._config, opened.reference, first.optimizer, self.device)
        for each in (made, teacher):
            if each is not None and not again:
                refuse_holes(each)
        arguments = {
            "learners": opened.learners, "beside": opened.beside, "threads": engine.threads, "teacher": teacher,
            "max_model_len": served_length(self._config.policy_server),
        }  # fmt: skip
        group: Group | None = None
        settings = VerlConfig.of(self._config)
        try:
            if settings.world_size:
                self._own_cluster = connect(settings, self.device) or self._own_cluster
                group = OnRay(settings, made, arguments, self.device, again=again)
            else:
                group = Alone(made, arguments)
            self.ranks = group.run("place", [()] * group.size)
            self.group, self._chosen = group, 0
        finally:
            if self._opened is None:  # `close` was called meanwhile, and could not end these workers
                self.group = None
                self._end(group)
        self.ready()

    def _end(self, group: Group | None) -> None:
        if group is not None:
            group.close()
        own, self._own_cluster = self._own_cluster, False
        if own:
            import ray

            ray.shutdown()

    def _revive(self, error: WorkersLostError) -> None:
        if self._opened is None:
            raise EngineError("the engine was closed while it computed") from error
        allowed, short, cure = VerlConfig.of(self._config).restarts, "out of memory" in str(error), "resume the run"
        longest, self._longest = self._longest, 0
        for member in self._members:
            member.discard_gradient()
        if short:
            self._refuse_least(longest, error)
            cure = f"lower engine.tokens_per_microbatch, which is {self.budget} now, and resume the run; or {MORE_ROOM}"
        steps = sum(member.taken.steps for member in self._members)
        if steps != self._died_at:  # a step was taken since, so earlier deaths no longer count
            self._restarts, self._died_at = 0, steps
        if self._restarts >= allowed:
            raise EngineError(f"{error}; engine.verl.restarts = {allowed} were used up: {cure}") from error
        for member in self._members:
            taken = member.taken.steps
            if taken and (member.saved is None or member.saved[1].steps != taken):
                raise EngineError(
                    f"{error}; the last checkpoint is older than step {taken}, so nothing can be done again from here "
                    f"(trainer.checkpoint_every = 1 lets the engine go on by itself): {cure}"
                ) from error
        self._restarts += 1
        if short:
            self.budget = max(1, longest, self.budget // 2)
            logger.warning("out of memory: going on with %d tokens per micro-batch", self.budget)
        logger.warning("%s; starting the workers again after step %d", error, self._members[0].taken.steps)
        self._start(again=True)
        for number, member in enumerate(self._members):
            if member.saved is not None:
                folder, done = member.saved
                self.run(number, "load", folder, done.policy, done.head)

    def _refuse_least(self, longest: int, error: WorkersLostError) -> None:
        """Raise `EngineError` after a lack of memory if micro-batches cannot be smaller than the longest row's `longest`
        tokens."""
        if self.budget > longest:
            return
        part, strategy = "a GPU's part of " * (self._sharing > 1), VerlConfig.of(self._config).strategy
        raise EngineError(
            f"{error}; no smaller micro-batch is left, for {part}one row has {longest} tokens: set "
            f"engine.gradient_checkpointing = true and resume; let more GPUs share a row ({SHARING[strategy]}); or "
            f"{SMALLER_ROWS}"
        ) from error


def deal(lengths: Sequence[int], places: int) -> list[list[int]]:
    """Deal rows to places: return the indices of each place's rows, longest first, so that places have about equally many
    tokens. The last places may have one row less."""
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    hands: list[list[int]] = [[] for _ in range(places)]
    for turn, start in enumerate(range(0, len(order), places)):
        row = order[start : start + places]
        # To and fro: the place with the longest row of one round gets the shortest of the next.
        for place, index in zip(range(places) if turn % 2 == 0 else reversed(range(places)), row, strict=False):
            hands[place].append(index)
    return hands


def filler(sample: Sample) -> Sample:
    """Return a copy of a row without weights and spans, which is computed and counts for nothing."""
    zeros = np.zeros(len(sample), np.float32)
    return replace(sample, weights=zeros, spans=())


def share(samples: Sequence[Sample], hand: Sequence[int], count: int) -> list[Sample]:
    """Return the rows of a place, filled up to `count` with copies of the shortest row of all."""
    shortest = min(samples, key=len)
    return [*(samples[index] for index in hand), *[filler(shortest)] * (count - len(hand))]

"""Samples for a loop of your own, while its engine trains: groups wait in a queue and begin when places for agents are free.

The invariant: a group is of the step that was next when it began (`Rollout.step`). It is handed over when none of its rollouts
can change any more: all have ended, those that nobody wants any more as cancelled. So a group in the store is the group that
was trained. What a call, a stream or an earlier process began and gave up is ended, and belongs to no step.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from lightning.asyncio_utils import cancel
from lightning.batch import Group
from lightning.bounded import Once
from lightning.errors import RunnerError, UnavailableError
from lightning.policy_server.auto_settings import shares_gpu
from lightning.safe_text import counted
from lightning.trainer.plan import TRAIN, as_tasks, is_lost, newest_generation, train_rollouts
from lightning.trainer.samplers import Sampled, Sampler
from lightning.trainer.training_data import all_rollouts
from lightning.types import Fault, Json, Rollout, Status, Task

logger = logging.getLogger(__name__)

OVER = "the session is over, and its agents were ended"
GIVEN_UP = "the rollout() or stream() that wanted it was given up, and it is in no step"
TOO_OLD = "its group became too old for the next step, and it is in no step"


@dataclass(slots=True, eq=False)
class Wanted:
    """A group that is wanted: `size` rollouts of a task, of which at least `keep` are to end by themselves. `planned` are those
    that have not begun, `running` the ids of those that have and have not ended. `over` says why no more of them are wanted; ""
    while they are. `retries` is how many more times its task may be asked."""

    task: Task
    size: int
    keep: int
    retries: int = 0
    step: int = 0
    planned: list[Rollout] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    ended: list[Rollout] = field(default_factory=list)
    over: str = ""

    @property
    def begun(self) -> bool:
        """Whether it is of a step."""
        return self.step > 0

    @property
    def done(self) -> bool:
        """Whether all of its rollouts have ended, or will not begin."""
        return self.begun and not self.running and not self.planned

    @property
    def rollouts(self) -> list[Rollout]:
        """Those that have ended, in their order, without cancelled ones."""
        return sorted(
            (one for one in self.ended if one.status is not Status.CANCELLED), key=lambda one: (one.group, one.index)
        )

    def give_up(self, why: str) -> None:
        """Let no more of its rollouts begin, and end those that run."""
        self.over, self.planned = why, []


@dataclass(slots=True)
class Clock:
    """Counts the seconds in which agents ran (`sampled`), and those of them in which the engine trained (`overlap`)."""

    sampling: bool = False
    training: bool = False
    sampled: float = 0.0
    overlap: float = 0.0
    _since: float = field(default_factory=time.monotonic)

    def note(self, *, sampling: bool | None = None, training: bool | None = None) -> None:
        """Note that one of both has begun or ended; None: it is as before."""
        now = time.monotonic()
        self.sampled += (now - self._since) * self.sampling
        self.overlap += (now - self._since) * (self.sampling and self.training)
        self._since = now
        self.sampling = self.sampling if sampling is None else sampling
        self.training = self.training if training is None else training

    def take(self) -> tuple[float, float]:
        """Return `sampled` and `overlap`, and count anew."""
        self.note()
        found, self.sampled, self.overlap = (self.sampled, self.overlap), 0.0, 0.0
        return found

    def put_back(self, sampled: float, overlap: float) -> None:
        """Count again what was taken."""
        self.sampled, self.overlap = self.sampled + sampled, self.overlap + overlap


class Queue(Sampler):
    """Runs what a session wants. It is also the `Source` that the worker asks for new rollouts.

    `next` is the step that is next for groups that begin: one more than the policy server's weights have.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.next = 1
        self.clock = Clock()
        self.left_out = Counter[str]()
        """How many groups of streams have become too old since the last step, and how many of their tasks are asked again, by
        the names of these metrics."""
        self._waiting = deque[Wanted]()
        self._open: list[Wanted] = []
        """The groups that have begun and are not done."""
        self._streams: list[weakref.ref[Stream]] = []
        self._unfinished: dict[str, Wanted | None] = {}
        """The rollouts that were created and have not ended; None for those that are of no wanted group."""
        self._branching = self._alone = 0
        self._streams_first = True
        self._places = Counter[int]()
        self._generation = (0, 0)
        """The step for which an earlier process has begun groups, and the generation of those that begin for it now."""
        self._news = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    # what the session asks --------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the worker. Groups of the next step get other ids than those that an earlier process began for it."""
        known = await all_rollouts(self.stack.store, self.stack.run.id, split=TRAIN, step=self.next)
        self._generation = (self.next, newest_generation(known) + 1 if known else 0)
        self._worker = asyncio.create_task(self.stack.sample(self, self._ended))
        self._worker.add_done_callback(lambda _: self.stir())

    async def close(self) -> None:
        """Stop the worker: agents that still run are ended, and their leases are given back."""
        if self._worker is not None:
            await cancel(self._worker)

    async def step(self, step: int) -> Sampled:
        """A session takes its steps itself."""
        raise NotImplementedError

    def want(self, task: Task, size: int, keep: int) -> Wanted:
        """Let a group begin as soon as there is a place for an agent, behind those that were wanted before."""
        group = Wanted(task, size, keep)
        self._waiting.append(group)
        self.changed.set()
        return group

    def give_up(self, groups: Iterable[Wanted]) -> None:
        """End what runs of these groups, and let nothing else of them begin. Returns at once."""
        for group in groups:
            if not group.done:
                group.give_up(GIVEN_UP)
        self._settle()

    def check_wanted(self, groups: Iterable[Wanted]) -> None:
        """Raise `RunnerError` for groups that were given up by the end of the session."""
        if any(group.over == GIVEN_UP for group in groups):
            raise RunnerError(OVER)

    async def give_up_all(self) -> None:
        """End all that is under way, before the session ends. Where clients run the agents, they end what they run."""
        for each in self._streams:
            if (stream := each()) is not None:
                await stream.aclose()
        self.give_up([*self._open, *self._waiting])
        if self.stack.agents.runner.concurrency:
            await self.until(lambda: self.idle)

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until something has happened after which this is true. Raises what the worker failed with."""
        while not ready():
            if self._worker is None or self._worker.done():
                if self._worker is not None and not self._worker.cancelled():
                    self._worker.result()
                raise RunnerError(OVER)
            await self._news.wait()

    @property
    def busy(self) -> bool:
        """Whether somebody still wants training rollouts that have not ended."""
        groups = any(group.over != GIVEN_UP for group in (*self._open, *self._waiting))
        return groups or bool(self._branching) or any(each() is not None for each in self._streams)

    @property
    def idle(self) -> bool:
        """Whether no rollout runs, or waits for a place."""
        return not self._unfinished

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """For the length of the block no agent runs; those that run come to their end before it, and none begins."""
        self._alone += 1
        try:
            await self.until(lambda: self.idle)
            yield
        finally:
            self._alone -= 1
            self.stir()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The engine trains in the block. Where the policy server sleeps meanwhile, no agent runs."""
        turns = shares_gpu(self.stack.config) and not self.config.max_staleness
        async with self.alone() if turns else _open():
            self.clock.note(training=True)
            try:
                yield
            finally:
                self.clock.note(training=False)

    async def finish(self, rollouts: list[Rollout]) -> None:
        """Run rollouts of no wanted group (branches, an evaluation) to their end."""
        trained = rollouts[0].split == TRAIN
        self._branching += trained
        try:
            await self.until(lambda: not (self._alone and trained))
            self._unfinished |= dict.fromkeys((rollout.id for rollout in rollouts), None)
            self.stir()
            await self.stack.create(rollouts)
            one, own = rollouts[0], {rollout.id for rollout in rollouts}
            for known in await all_rollouts(self.stack.store, one.run, split=one.split, step=one.step):
                # Of others the worker tells `_ended` a little later than the store knows it, and must find their groups here.
                if known.id in own and known.status.ended:  # before this process
                    self._unfinished.pop(known.id, None)
            self.stir()
            await self.until(lambda: not any(rollout.id in self._unfinished for rollout in rollouts))
        except BaseException:
            given_up = Wanted(rollouts[0].task, 0, 0, over=GIVEN_UP)
            for rollout in rollouts if trained else ():
                if rollout.id in self._unfinished:
                    self._unfinished[rollout.id] = given_up
            raise
        finally:
            self._branching -= trained
            self.stir()

    async def served(self, version: int) -> None:
        """Groups that begin now are of the step behind this version. Those of streams that are too old for it are left out."""
        self.next = version + 1
        for each in self._streams:
            if (stream := each()) is not None:
                stream.leave_late()
        self._settle()

    # what the worker asks ---------------------------------------------------------------------------------------
    async def refill(self) -> bool:
        """Begin rollouts of the oldest group that has more, else the next group; return whether any have begun."""
        if self._alone:
            return False
        group = next((each for each in self._open if each.planned), None) or self._following()
        if group is None:
            return False
        first = group.keep if not group.begun else 1
        if not group.begun:
            self._begin(group)
        now, group.planned = group.planned[:first], group.planned[first:]
        group.running |= {rollout.id for rollout in now}
        self._unfinished |= dict.fromkeys((rollout.id for rollout in now), group)
        self.clock.note(sampling=True)
        await self.stack.create(now)
        return True

    def unwanted(self, rollout: Rollout) -> str:
        """Return why a rollout is to be ended: enough of its group have ended, or what wanted it was given up."""
        if rollout.id not in self._unfinished:
            return "" if rollout.split != TRAIN else GIVEN_UP  # by an earlier process
        group = self._unfinished[rollout.id]
        return "" if group is None else group.over

    # inside -----------------------------------------------------------------------------------------------------
    def _following(self) -> Wanted | None:
        """Return the next group that may begin: in turn one that a call wants and one of a stream."""
        self._streams_first = not self._streams_first
        sources = (self._of_streams, self._of_calls) if self._streams_first else (self._of_calls, self._of_streams)
        return sources[0]() or sources[1]()

    def _of_calls(self) -> Wanted | None:
        while self._waiting:
            if not (group := self._waiting.popleft()).over:
                return group
        return None

    def _of_streams(self) -> Wanted | None:
        self._streams = [each for each in self._streams if each() is not None]
        for place, each in enumerate(self._streams):
            stream = each()
            if stream is not None and (found := stream.following()) is not None:
                self._streams = [*self._streams[place + 1 :], *self._streams[: place + 1]]  # the others are next
                return found
        return None

    def _begin(self, group: Wanted) -> None:
        step, (known, newest) = self.next, self._generation
        attempts, number = self.stack.config.runner.max_attempts, newest if step == known else 0
        group.step, place = step, self._places[step]
        group.planned = train_rollouts(
            self.stack.run.id, step, [group.task], group.size, attempts, generation=number, first=place
        )
        self._places[step] += 1
        self._open.append(group)

    def _ended(self, rollout: Rollout) -> None:
        """Note that a rollout has ended for good."""
        if rollout.status is not Status.CANCELLED:
            self.finished(rollout)
        group = self._unfinished.pop(rollout.id, None)
        if group is not None:
            group.running.discard(rollout.id)
            group.ended.append(rollout)
            if not group.over and sum(map(self.counts, group.ended)) >= group.keep and not group.done:
                group.give_up(
                    f"{counted(group.keep, 'rollout')} of its group had ended, which is how many were to be kept"
                )
        self._settle()

    def counts(self, rollout: Rollout) -> bool:
        """Whether a rollout that has ended is one of its group's."""
        by_policy = rollout.fault is Fault.POLICY and self.config.policy_fault != "exclude"
        return rollout.status is Status.SUCCEEDED or by_policy

    def _settle(self) -> None:
        self._open = [group for group in self._open if not group.done]
        self.clock.note(sampling=not self.idle)
        self.stir()

    def stir(self) -> None:
        """Let those who wait look again, and let the worker ask again."""
        self._news.set()
        self._news = asyncio.Event()
        self.changed.set()

    def add(self, stream: Stream) -> None:
        """Let groups of a stream begin whenever no group that was wanted otherwise waits."""
        self._streams.append(weakref.ref(stream))
        self.changed.set()

    def remove(self, stream: Stream) -> None:
        """Forget a stream."""
        self._streams = [each for each in self._streams if each() not in (None, stream)]

    @property
    def places(self) -> int:
        """How many agents may run at once."""
        asked = self.stack.config.runner.concurrency
        return min(self.stack.agents.runner.concurrency or asked, asked)


@asynccontextmanager
async def _open() -> AsyncIterator[None]:
    yield


class Stream:
    """Groups as they complete (`Session.stream`): `async for group in stream`. The loop may be left at any time; `aclose()`
    ends the stream sooner than the last reference to it. What is under way then is ended and is in no step."""

    def __init__(
        self,
        queue: Queue,
        tasks: Iterator[Task | Json],
        size: int,
        keep: int,
        ahead: int,
        again: int,
        took: Callable[[Wanted], Awaitable[Group]],
    ) -> None:
        self._queue, self._tasks, self._size, self._keep, self._ahead = queue, tasks, size, keep, ahead
        self._retries, self._took = again, took
        self._under_way: list[Wanted] = []
        self._retried = deque[Wanted]()
        """The groups of tasks that are asked again, and have not begun."""
        self._read = self._closed = False
        self._error: BaseException | None = None
        self._failed: list[Rollout] = []
        """The rollouts of the last groups that failed as a whole, one behind another."""
        self._said = Once()
        queue.add(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Group:
        """Return the oldest group that is done. Raises `RunnerError` when as many rollouts as may be under way have failed, in
        groups one behind another without a rollout of use, and what `tasks` raised; `UnavailableError` when the store cannot be
        reached now, after which the same group comes; and the error of a group that cannot be read, which is then passed over.
        """
        if self._next() is None:
            self._queue.reporter.phase(f"rollouts of a stream for step {self._queue.next}")
        while True:
            await self._queue.until(lambda: self._next() is not None or self._is_over)
            if (group := self._next()) is None:
                self._close()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                self._check()
                raise StopAsyncIteration
            self._under_way.remove(group)
            self._queue.changed.set()  # one more may begin
            try:
                found = await self._took(group)
            except (asyncio.CancelledError, UnavailableError):
                self._put_back(group)
                raise
            if found.trajectories:
                self._failed = []
                return found
            self._note_failed(group)
            self._check()

    async def aclose(self) -> None:
        """End what is under way. Idempotent."""
        self._close()

    def __del__(self) -> None:
        self._close()

    def following(self) -> Wanted | None:
        """Return the next group that may begin, first those of tasks that are asked again; None if there is none now."""
        if len(self._under_way) >= self._ahead or (self._read and not self._retried):
            return None
        if self._retried:
            self._under_way.append(group := self._retried.popleft())
            return group
        try:
            (task,) = as_tasks([next(self._tasks)], "tasks")
        except StopIteration:
            self._read = True
        except Exception as error:  # noqa: BLE001 — it is raised where the groups are taken
            self._read, self._error = True, error
        else:
            self._under_way.append(group := Wanted(task, self._size, self._keep, self._retries))
            return group
        self._queue.stir()
        return None

    @property
    def _is_over(self) -> bool:
        all_taken = self._read and not self._under_way and not self._retried
        return all_taken or self._is_lost or self._error is not None

    @property
    def _is_lost(self) -> bool:
        """Whether as many rollouts as may be under way have failed, and none between them was of use."""
        return len(self._failed) >= self._ahead * self._size and is_lost(self._failed)

    def _note_failed(self, group: Wanted) -> None:
        """Warn of the rollouts of a group of which none is of use, and count them."""
        self._failed += group.rollouts
        self._queue.tell_failed("rollouts of a group", group.rollouts)

    def _check(self) -> None:
        """Close the stream, and raise `RunnerError`, when all of its last groups have failed."""
        if self._is_lost:
            self._close()
            failed, self._failed = self._failed, []
            self._queue.check("rollouts of a stream", failed)

    def _next(self) -> Wanted | None:
        return next((group for group in self._under_way if group.done), None)

    def _close(self) -> None:
        self._read = self._closed = True
        self._queue.remove(self)
        self._queue.give_up(self._under_way)
        self._under_way = []
        self._retried.clear()

    def _put_back(self, group: Wanted) -> None:
        """Let a group that nobody has be the next one again, unless it has become too old meanwhile."""
        if not self._closed:
            self._under_way.insert(0, group)
            self.leave_late()
            self._queue.stir()

    def leave_late(self) -> None:
        """Leave out the groups that have become too old for the next step: end what runs of them, and ask their tasks again. A
        group whose rollouts have all failed would be left out at any age, and counts as failed alone."""
        oldest = self._queue.next - self._queue.config.max_staleness
        for group in [group for group in self._under_way if group.begun and group.step < oldest]:
            self._under_way.remove(group)
            if any(map(self._queue.counts, group.rollouts)):
                self._failed = []
            elif group.done:
                self._note_failed(group)
                continue
            elif group.rollouts:  # what the others would have done is not known
                self._queue.tell_failed("rollouts of a group", group.rollouts)
            self._queue.left_out["groups_too_old"] += 1
            if group.retries:
                self._queue.left_out["groups_asked_again"] += 1
                self._retried.append(Wanted(group.task, group.size, group.keep, group.retries - 1))
            if not group.done:
                group.give_up(TOO_OLD)
            self._tell_late(group)

    def _tell_late(self, group: Wanted) -> None:
        """Say that a group has become too old for the next step: the first time, and the first time that its task is lost."""
        if self._said.first(bool(group.retries)):
            logger.warning(
                "a group of the task %s began for step %d, and trainer.max_staleness = %d lets no step behind %d train it: it "
                "is left out, and its task is %s (again = %d). The metrics groups_too_old and groups_asked_again count those "
                "to come. Take more groups in a step, give stream() a smaller ahead (it is %d) or a larger again, or raise "
                "trainer.max_staleness",
                group.task.id,
                group.step,
                self._queue.config.max_staleness,
                group.step + self._queue.config.max_staleness,
                "asked again" if group.retries else "not asked once more",
                self._retries,
                self._ahead,
            )

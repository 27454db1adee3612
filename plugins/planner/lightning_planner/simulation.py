"""The training loop, simulated: which groups begin, which a step takes, and how long everybody waits.

The invariant: what decides is what decides in a run. In turns, a step's groups run to their end, then the engine trains; with
`max_staleness` above 0 the same `Pacer` as in a run says which groups may begin and which a step takes. A group begins only
when a place is free. Evaluations are left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_samplers.pacing import Pacer

from lightning_planner.costs import Agent, Costs, Schedule, Team
from lightning_planner.serving import Floor, Kernel, Running


@dataclass(frozen=True, slots=True)
class Step:
    """One simulated step, in seconds: `rollout` is how long the trainer waited for groups. Staleness is that of the trained
    tokens, in optimizer steps, counted from the version that sampled the first token of their call."""

    rollout: float
    train: float
    checkpoint: float
    update: float
    rows: int
    tokens: int
    staleness_mean: float
    staleness_max: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.rollout + self.train + self.checkpoint + self.update


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of a simulation. Shares are of the time after the first step, which begins with nothing under way:
    `server_busy` that of the policy server, `batch` the sequences that it decodes at once while it is busy, `places_busy`
    the share of `concurrency` that runs a rollout, `trainer_busy` training, checkpoints and updates."""

    steps: tuple[Step, ...]
    server_busy: float
    batch: float
    places_busy: float
    trainer_busy: float

    @property
    def steady(self) -> Sequence[Step]:
        """The steps without the first one, if there are others."""
        return self.steps[1:] or self.steps

    def mean(self, of: Callable[[Step], float]) -> float:
        """The mean of a number over the steady steps."""
        return sum(map(of, self.steady)) / len(self.steady)


def simulate(schedule: Schedule, costs: Costs, teams: Iterator[Team]) -> Simulated:
    """Take `schedule.steps` steps on the groups that `teams` gives; it must give enough of them.

    Raises `ValueError` for a schedule without a step.
    """
    if schedule.steps < 1:
        raise ValueError("there is nothing to simulate in 0 steps")
    loop = (_Pipeline if schedule.max_staleness else _Turns)(schedule, costs, teams)
    steps = [loop.step(number) for number in range(schedule.steps)]
    return loop.meter.result(steps, schedule)


@dataclass(slots=True)
class _Meter:
    """Adds up, over time, what is busy."""

    seconds: float = 0.0
    server: float = 0.0
    batch: float = 0.0
    places: float = 0.0
    trainer: float = 0.0

    def result(self, steps: Sequence[Step], schedule: Schedule) -> Simulated:
        total = self.seconds or 1.0
        return Simulated(
            steps=tuple(steps),
            server_busy=self.server / total,
            batch=self.batch / self.server if self.server else 0.0,
            places_busy=self.places / schedule.concurrency / total,
            trainer_busy=self.trainer / total,
        )


@dataclass(slots=True, eq=False)
class _Group:
    """A group that has begun; `ran` are its rollouts that have ended."""

    team: Team
    ran: list[Running] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return len(self.ran) == len(self.team.agents)


class _Loop(ABC):
    """What both ways of sampling have in common: places for rollouts, a trainer, a policy with a version."""

    def __init__(self, schedule: Schedule, costs: Costs, teams: Iterator[Team]) -> None:
        self.schedule, self.costs, self.teams = schedule, costs, teams
        self.kernel, self.meter = Kernel(), _Meter()
        self.floor = Floor(self.kernel, costs, lambda: self.version)
        self.version, self.training = 0, False
        self._free = schedule.concurrency
        self._waiting: deque[tuple[Agent, _Group]] = deque()
        self.kernel.before = self._measure

    @abstractmethod
    def collect(self, step: int) -> list[_Group]:
        """Wait for the groups of a step, which are then taken."""

    def served(self) -> None:  # noqa: B027 — nothing to do for those who sample in turns
        """The policy has a new version."""

    def refill(self) -> bool:
        """Let a group begin because a place is free; whether one did."""
        return False

    def ended(self, group: _Group) -> None:  # noqa: B027 — as above
        """All rollouts of a group have ended."""

    def step(self, step: int) -> Step:
        """Wait for groups, train, write a checkpoint, update the server."""
        if step == 1:
            self.meter = _Meter()
        began = self.kernel.now
        groups = self.collect(step)
        waited = self.kernel.now - began
        self.training = True
        rows = sum(running.agent.rows for group in groups if group.team.teaches for running in group.ran)
        costs = self.costs.trainer
        train = self._train(costs.step + costs.row_token * rows + (0.0 if step else costs.first) if rows else 0.0)
        due = (step + 1) % self.schedule.checkpoint_every == 0 or step + 1 == self.schedule.steps
        checkpoint = self._train(costs.checkpoint if due else 0.0)
        update = self._train(costs.export)
        self.floor.server.paused = True
        update += self._pass(max(0.0, costs.update - costs.export))
        self.floor.server.paused = False
        self.training = False
        self.version = step + 1
        self.served()
        ages = [
            (step - version, tokens)
            for group in groups
            if group.team.teaches
            for running in group.ran
            if running.agent.rows
            for version, tokens in running.versions
        ]
        tokens = sum(count for _, count in ages)
        mean = sum(age * count for age, count in ages) / tokens if tokens else 0.0
        oldest = max((age for age, _ in ages), default=0)
        return Step(waited, train, checkpoint, update, rows, tokens, mean, oldest)

    def open(self, team: Team) -> _Group:
        """Let the rollouts of a group wait for places."""
        group = _Group(team)
        self._waiting.extend((agent, group) for agent in team.agents)
        return group

    def fill(self) -> None:
        """Give free places to rollouts that wait, or to a new group's."""
        while self._free and (self._waiting or self.refill()):
            agent, group = self._waiting.popleft()
            self._free -= 1
            self.floor.start(agent, lambda running, group=group: self._ended(running, group))  # type: ignore[misc]

    def until(self, done: Callable[[], bool]) -> None:
        """Let time go by until something is so."""
        while not done():
            self.floor.retune()
            moved = self.kernel.step()
            assert moved, "nothing is under way that could bring it about"

    def _ended(self, running: Running, group: _Group) -> None:
        group.ran.append(running)
        if group.ended:
            self.ended(group)
        self.floor.dispatch(self._freed)

    def _freed(self) -> None:
        self._free += 1
        self.fill()

    def _train(self, work: float) -> float:
        """Let the trainer's thread do so many seconds of work; returns how long that took."""
        began, over = self.kernel.now, [False]
        self.floor.training.begin(work, lambda: over.__setitem__(0, True))
        self.until(lambda: over[0])
        return self.kernel.now - began

    def _pass(self, seconds: float) -> float:
        end = self.kernel.now + seconds
        self.kernel.after(seconds, lambda: None)
        self.until(lambda: self.kernel.now >= end)
        return seconds

    def _measure(self, seconds: float) -> None:
        meter = self.meter
        meter.seconds += seconds
        server = self.floor.server
        if server.busy and not server.paused:
            meter.server += seconds
            meter.batch += seconds * server.batch
        meter.places += seconds * self.floor.rollouts
        meter.trainer += seconds * self.training


class _Turns(_Loop):
    """Samples and trains in turns."""

    def collect(self, step: int) -> list[_Group]:
        """See `_Loop.collect`: with dynamic sampling in waves, until enough of them teach."""
        schedule, taken = self.schedule, list[_Group]()
        for _ in range(schedule.max_waves if schedule.dynamic_sampling else 1):
            wave = [self.open(next(self.teams)) for _ in range(schedule.tasks_per_step)]
            self.fill()
            self.until(lambda wave=wave: all(group.ended for group in wave))  # type: ignore[misc]
            taken += wave
            if sum(group.team.teaches for group in taken) >= schedule.tasks_per_step:
                break
        self._pass(self.costs.turn)
        return taken


class _Pipeline(_Loop):
    """Samples all the time."""

    def __init__(self, schedule: Schedule, costs: Costs, teams: Iterator[Team]) -> None:
        super().__init__(schedule, costs, teams)
        self._pacer = Pacer(schedule.tasks_per_step, schedule.max_staleness, schedule.steps)
        self._groups: dict[str, _Group] = {}
        self._begun, self._news = 0, True
        self.fill()

    def collect(self, step: int) -> list[_Group]:
        """See `_Loop.collect`."""
        dropped: list[_Group] = []
        left = (self.schedule.max_waves - 1) * self.schedule.tasks_per_step if self.schedule.dynamic_sampling else 0
        picked: list[str] = []

        def pick() -> bool:
            if not self._news:
                return False
            self._news = False
            self._drop_useless(dropped, left)
            found = self._pacer.pick()
            picked.extend(found or ())
            return found is not None

        self.until(pick)
        return [*dropped, *(self._groups.pop(group) for group in picked)]

    def served(self) -> None:
        """See `_Loop.served`: there is room for the groups of another step."""
        self._pacer.advance(self.version)
        self._news = True
        self.fill()

    def refill(self) -> bool:
        """See `_Loop.refill`: as long as the bound on staleness has room."""
        if not self._pacer.room:
            return False
        name = str(self._begun)
        self._begun += 1
        self._groups[name] = self.open(next(self.teams))
        self._pacer.begin(name)
        return True

    def ended(self, group: _Group) -> None:
        """See `_Loop.ended`."""
        name = next(name for name, known in self._groups.items() if known is group)
        self._pacer.finish(name)
        self._news = True

    def _drop_useless(self, dropped: list[_Group], most: int) -> None:
        """Take finished groups that teach nothing without counting them."""
        for open_group in self._pacer.open_groups:
            if len(dropped) >= most:
                return
            group = self._groups[open_group.id]
            if open_group.finished and not group.team.teaches:
                self._pacer.drop(open_group.id)
                dropped.append(self._groups.pop(open_group.id))
                self.fill()

"""A discrete-event simulation of a run: the gateway, the policy servers, the agents, and the training loop, which decides which
groups begin, which a step takes, and how long each part waits.

The invariant: decisions are made as in a real run. In turns, a step's groups run to their end, then the engine trains. With
`max_staleness` above 0 the same `Pacer` as in a run decides which groups may begin and which a step takes. A group begins only
when a place is free. Evaluations are left out.

Work is conserved. A job of some units on a clock ends when the clock has run exactly that far, however often its rate changed
meanwhile, so that a change of rate costs nothing. Resources are shared as `Sharing` says at every moment: rates are set again
whenever a part begins or ends to work. A rollout stays with one server. A server admits calls in the order in which they
came, and a call keeps its place to its end. Jobs that share something at the same speed (sequences in one batch, threads on the
same cores) share one `Clock`: it counts units of work of each job, and jobs end in the order of their ends on it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from lightning_samplers.pacing import Pacer

from lightning_planner.costs import Agent, Call, Costs, Schedule, ServerCosts, Team

Action = Callable[[], None]


class Clock:
    """Counts the units of work that each of its jobs has done so far. `rate` is in units per second and may change at any
    moment."""

    __slots__ = ("_jobs", "_numbers", "done", "rate")

    def __init__(self, rate: float = 0.0) -> None:
        self.done, self.rate = 0.0, rate
        self._jobs: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, units: float, action: Action) -> None:
        """Begin a job: call `action` when this many more units are done."""
        heapq.heappush(self._jobs, (self.done + units, next(self._numbers), action))

    def seconds(self) -> float:
        """Return the seconds until the next job ends at the present rate; infinity when none will end."""
        if not self._jobs or self.rate <= 0.0:
            return math.inf
        return max(0.0, (self._jobs[0][0] - self.done) / self.rate)

    def run(self, seconds: float) -> None:
        """Advance by this many seconds."""
        self.done += seconds * self.rate

    def end(self) -> Action:
        """Advance to the end of the next job, remove it, and return its action."""
        units, _, action = heapq.heappop(self._jobs)
        self.done = units
        return action


class Kernel:
    """The simulated time, in seconds, with its clocks and events. Nothing is random: the same jobs give the same times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waits = Clock(1.0)
        self._clocks = [self._waits]
        self.before: Callable[[float], None] = lambda seconds: None
        """Called with the seconds that are about to pass, before anything changes."""

    def clock(self) -> Clock:
        """Add a clock, whose rate is 0 at first."""
        clock = Clock()
        self._clocks.append(clock)
        return clock

    def after(self, seconds: float, action: Action) -> None:
        """Call `action` after this many seconds."""
        self._waits.begin(seconds, action)

    def step(self) -> bool:
        """Advance to the next event and run its action. Return False when no event is left."""
        seconds, chosen = math.inf, self._waits
        for clock in self._clocks:
            left = clock.seconds()
            if left < seconds:
                seconds, chosen = left, clock
        if seconds == math.inf:
            return False
        if seconds > 0.0:
            self.before(seconds)
            self.now += seconds
            for clock in self._clocks:
                clock.run(seconds)
        chosen.end()()
        return True


LEAST = 1e-12
"""The least seconds of a token, so that a server without costs has a finite rate."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call at a server, of the rollout `owner`, with the actions for its first token (`begun`) and its end (`ended`)."""

    call: Call
    owner: int
    begun: Action
    ended: Action

    @property
    def size(self) -> int:
        """The tokens that it takes of the KV cache."""
        return self.call.prompt + self.call.response


class Server:
    """A policy server, whose weights have a `version`. `speed` is its share of its device; it is `paused` while it gets new
    weights. `prompts` counts the tokens of its prompts, `again` those of them that it had to compute again."""

    def __init__(self, kernel: Kernel, costs: ServerCosts) -> None:
        self._costs = costs
        self._prompts, self._tokens = kernel.clock(), kernel.clock()
        self._line: deque[_Waiting] = deque()
        self._running: list[_Waiting] = []
        self._held, self._stall = 0, 0.0
        self._kept: dict[int, int] = {}
        self._kept_tokens = 0
        self.speed, self.paused, self.version = 1.0, False, 0
        self.prompts, self.again, self.rollouts = 0, 0, 0

    @property
    def busy(self) -> bool:
        """Whether the server computes, or would if it were not paused."""
        return bool(len(self._prompts) or len(self._tokens))

    @property
    def batch(self) -> int:
        """The number of sequences that are being decoded."""
        return len(self._tokens)

    def submit(self, call: Call, owner: int, begun: Action, ended: Action) -> None:
        """Take a call of a rollout: `begun` is called before its first token, `ended` after its last."""
        self._line.append(_Waiting(call, owner, begun, ended))
        self._admit()

    def drop(self) -> None:
        """Drop the prefix cache: what is in flight is computed again before it goes on."""
        if math.isinf(self._costs.kv_tokens):
            return  # not known: the recorded times have it
        self._kept, self._kept_tokens = {}, 0
        if again := sum(waiting.call.prompt for waiting in self._running):
            self._compute(again, again, lambda: None)

    def retune(self) -> None:
        """Set the rates again, after a job began or ended."""
        on = 0.0 if self.paused else self.speed
        self._prompts.rate = on
        every = self._costs.token + self._costs.token_per_call * len(self._tokens)
        self._tokens.rate = 0.0 if len(self._prompts) else on / max(every, LEAST)

    def _admit(self) -> None:
        costs = self._costs
        while self._line:
            waiting = self._line[0]
            over = len(self._running) >= costs.max_calls or self._held + waiting.size > costs.kv_tokens
            if self._running and over:
                return
            self._line.popleft()
            fresh = self._fresh(waiting)
            self._running.append(waiting)
            self._held += waiting.size
            self.prompts += waiting.call.prompt
            self._displace()
            self._compute(fresh, fresh - waiting.call.fresh, partial(self._decode, waiting), costs.request)

    def _compute(self, tokens: int, again: int, action: Action, request: float = 0.0) -> None:
        """Compute a prompt's tokens, after all earlier ones."""
        end = max(self._stall, self._prompts.done) + request + self._costs.prompt_token * tokens
        self._stall = end
        self.again += again
        self._prompts.begin(end - self._prompts.done, action)

    def _fresh(self, waiting: _Waiting) -> int:
        """Return the tokens of a prompt that have to be computed, and take its conversation out of what may be displaced."""
        call, owner = waiting.call, waiting.owner
        if math.isinf(self._costs.kv_tokens):
            return call.fresh
        kept = self._kept.pop(owner, 0)
        self._kept_tokens -= kept
        known = kept or call.after < 0 or any(other.owner == owner for other in self._running)
        return call.fresh if known else call.prompt

    def _displace(self) -> None:
        """Let the cache forget what was used longest ago, until what runs and what it keeps have room."""
        while self._kept and self._held + self._kept_tokens > self._costs.kv_tokens:
            self._kept_tokens -= self._kept.pop(next(iter(self._kept)))

    def _decode(self, waiting: _Waiting) -> None:
        waiting.begun()
        self._tokens.begin(waiting.call.response, lambda: self._end(waiting))

    def _end(self, waiting: _Waiting) -> None:
        self._running.remove(waiting)
        self._held -= waiting.size
        if math.isfinite(self._costs.kv_tokens):
            self._kept_tokens += waiting.size - self._kept.pop(waiting.owner, 0)
            self._kept[waiting.owner] = waiting.size
            self._displace()
        self._admit()
        waiting.ended()


@dataclass(slots=True, eq=False)
class Running:
    """A rollout under way at a `server`, with a `number` of its own and `left` calls to end. `versions` has, for each call in
    the order they began, the policy's version and the response's tokens."""

    agent: Agent
    number: int
    server: Server
    finished: Action
    left: int
    versions: list[tuple[int, int]] = field(default_factory=list)


class Floor:
    """The place of rollouts: cores for the agents, the gateway's processes, and the policy servers. `training` is the clock of
    the trainer's work; `rollouts` is how many are under way; `calls` counts the calls that the gateway has taken."""

    def __init__(self, kernel: Kernel, costs: Costs) -> None:
        self._kernel, self._costs = kernel, costs
        self._thinking, self._gateway = kernel.clock(), kernel.clock()
        self.training = kernel.clock()
        self.servers = [Server(kernel, costs.server) for _ in range(costs.servers)]
        self.rollouts, self.calls = 0, 0
        self._numbers = itertools.count()

    @property
    def busy(self) -> int:
        """The number of policy servers that compute."""
        return sum(server.busy and not server.paused for server in self.servers)

    @property
    def agents_busy(self) -> float:
        """The share of the agents' machines that computes; 0 if agents do not slow each other down."""
        return min(1.0, len(self._thinking) / self._costs.sharing.agents)

    def start(self, agent: Agent, finished: Callable[[Running], None]) -> None:
        """Begin a rollout at the server that has the fewest; `finished` is called at its end."""
        self.rollouts += 1
        server = min(self.servers, key=lambda each: each.rollouts)
        server.rollouts += 1
        running = Running(agent, next(self._numbers), server, lambda: None, len(agent.calls))

        def ended() -> None:
            self.rollouts -= 1
            server.rollouts -= 1
            finished(running)

        running.finished = ended
        if agent.calls:
            self._follow(running, -1)
        else:
            self._kernel.after(0.0, ended)

    def dispatch(self, action: Action) -> None:
        """Do the work of the agents' machines between two rollouts, then call `action`."""
        self._thinking.begin(self._costs.dispatch, action)

    def retune(self) -> None:
        """Set all rates again. Call it after every event."""
        sharing, training = self._costs.sharing, bool(len(self.training))
        threads = len(self._thinking) + (training and sharing.trainer_with_agents)
        alone = min(1.0, sharing.agents / threads) if threads else 1.0
        self._thinking.rate = alone
        self._gateway.rate = min(1.0, self._costs.gateway.processes / max(1, len(self._gateway)))
        device = 0.5 if sharing.one_device and training and self.busy else 1.0
        self.training.rate = device * (alone if sharing.trainer_with_agents else 1.0)
        for server in self.servers:
            server.speed = device
            server.retune()

    def _follow(self, running: Running, index: int) -> None:
        """Begin the calls that follow the call with this index."""
        for place, call in enumerate(running.agent.calls):
            if call.after == index:
                self._kernel.after(call.wait, lambda place=place: self._think(running, place))  # type: ignore[misc]

    def _think(self, running: Running, place: int) -> None:
        self._thinking.begin(running.agent.calls[place].work, lambda: self._call(running, place))

    def _call(self, running: Running, place: int) -> None:
        call, server = running.agent.calls[place], running.server
        self.calls += 1

        def begun() -> None:
            running.versions.append((server.version, call.response))

        def ended() -> None:
            self._kernel.after(self._costs.server.latency, lambda: self._returned(running, place))

        self._gateway.begin(self._costs.gateway.call, lambda: server.submit(call, running.number, begun, ended))

    def _returned(self, running: Running, place: int) -> None:
        running.left -= 1
        if running.left:
            self._follow(running, place)
        else:
            self._kernel.after(running.agent.wait, lambda: self._thinking.begin(running.agent.work, running.finished))


@dataclass(frozen=True, slots=True)
class Phases:
    """The seconds of a step by phase; `rollout` is how long the trainer waited for groups."""

    rollout: float
    train: float
    checkpoint: float
    update: float

    @property
    def total(self) -> float:
        """The seconds of the whole step."""
        return self.rollout + self.train + self.checkpoint + self.update


@dataclass(frozen=True, slots=True)
class Step(Phases):
    """One simulated step. Staleness is that of the trained tokens, in optimizer steps, from the version that sampled the first
    token of their call."""

    rows: int
    tokens: int
    staleness_mean: float
    staleness_max: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result of a simulation. Shares are of the time after the first step, which begins with nothing under way:
    `server_busy` is that of the policy servers, in the mean, `places_busy` the mean share of `concurrency` that runs a rollout,
    `trainer_busy` that of training, checkpoints and updates, `agents_busy` that of the agents' machines. `batch` is the mean
    number of sequences that a server decodes while it is busy. `calls` are calls a second. `again` is the share of the prompts'
    tokens that were computed again, 0 where the size of the KV cache is not known."""

    steps: tuple[Step, ...]
    server_busy: float
    batch: float
    places_busy: float
    trainer_busy: float
    calls: float = 0.0
    again: float = 0.0
    agents_busy: float = 0.0

    @property
    def steady(self) -> Sequence[Step]:
        """The steps without the first one; all where there is only one."""
        return self.steps[1:] or self.steps

    def mean(self, of: Callable[[Step], float]) -> float:
        """Return the mean of a number over the steady steps."""
        return sum(map(of, self.steady)) / len(self.steady)


def simulate(schedule: Schedule, costs: Costs, teams: Iterator[Team]) -> Simulated:
    """Simulate `schedule.steps` steps on the groups of `teams`, which must give enough.

    Raises `ValueError` for a schedule without a step.
    """
    if schedule.steps < 1:
        raise ValueError("there is nothing to simulate in 0 steps")
    loop = (_Pipeline if schedule.max_staleness else _Turns)(schedule, costs, teams)
    steps = [loop.step(number) for number in range(1, schedule.steps + 1)]
    return loop.meter.result(steps, schedule, loop.floor)


@dataclass(slots=True)
class _Meter:
    """Adds up how long, and how much, each part is busy."""

    seconds: float = 0.0
    server: float = 0.0
    batch: float = 0.0
    places: float = 0.0
    trainer: float = 0.0
    agents: float = 0.0

    def result(self, steps: Sequence[Step], schedule: Schedule, floor: Floor) -> Simulated:
        total, prompts = self.seconds or 1.0, sum(server.prompts for server in floor.servers)
        return Simulated(
            steps=tuple(steps),
            server_busy=self.server / total / len(floor.servers),
            batch=self.batch / self.server if self.server else 0.0,
            places_busy=self.places / schedule.concurrency / total,
            trainer_busy=self.trainer / total,
            calls=floor.calls / total,
            agents_busy=self.agents / total,
            again=sum(server.again for server in floor.servers) / prompts if prompts else 0.0,
        )


@dataclass(slots=True, eq=False)
class _Group:
    """A group that has begun; `ran` are its ended rollouts."""

    team: Team
    ran: list[Running] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return len(self.ran) == len(self.team.agents)


class _Loop(ABC):
    """The parts that both ways of sampling share: places for rollouts, a trainer, a policy with a version."""

    def __init__(self, schedule: Schedule, costs: Costs, teams: Iterator[Team]) -> None:
        self.schedule, self.costs, self.teams = schedule, costs, teams
        self.kernel, self.meter = Kernel(), _Meter()
        self.floor = Floor(self.kernel, costs)
        self.training = False
        self._free = schedule.concurrency
        self._waiting: deque[tuple[Agent, _Group]] = deque()
        self.kernel.before = self._measure

    @abstractmethod
    def collect(self, step: int) -> list[_Group]:
        """Wait for the groups of a step, take them, and return them."""

    def served(self, version: int) -> None:  # noqa: B027 — nothing to do for those who sample in turns
        """Called when all servers have a new version."""

    def refill(self) -> bool:
        """Begin a group because a place is free; return whether one began."""
        return False

    def ended(self, group: _Group) -> None:  # noqa: B027 — as above
        """Called when all rollouts of a group have ended."""

    def step(self, step: int) -> Step:
        """Simulate a step: wait for groups, train, write a checkpoint, update the server."""
        if step == 2:
            self.meter, self.floor.calls = _Meter(), 0
            for server in self.floor.servers:
                server.prompts = server.again = 0
        began = self.kernel.now
        groups = self.collect(step)
        waited = self.kernel.now - began
        self.training = True
        rows = sum(running.agent.rows for group in groups if group.team.teaches for running in group.ran)
        costs = self.costs.trainer
        train = self._train(costs.step + costs.row_token * rows + (costs.first if step == 1 else 0.0) if rows else 0.0)
        due = step % self.schedule.checkpoint_every == 0 or step == self.schedule.steps
        checkpoint = self._train(costs.checkpoint if due else 0.0)
        update = self._train(costs.export) + self._load(step)
        self.training = False
        self.served(step)
        ages = [
            (step - 1 - version, tokens)
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
        """Add a group, whose rollouts wait for places, and return it."""
        group = _Group(team)
        self._waiting.extend((agent, group) for agent in team.agents)
        return group

    def fill(self) -> None:
        """Start waiting rollouts, or those of a new group, on the free places."""
        while self._free and (self._waiting or self.refill()):
            agent, group = self._waiting.popleft()
            self._free -= 1
            self.floor.start(agent, lambda running, group=group: self._ended(running, group))  # type: ignore[misc]

    def until(self, done: Callable[[], bool]) -> None:
        """Advance the time until `done` returns true."""
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
        """Do this many seconds of work on the trainer's thread; return how long that took."""
        began, over = self.kernel.now, [False]
        self.floor.training.begin(work, lambda: over.__setitem__(0, True))
        self.until(lambda: over[0])
        return self.kernel.now - began

    def _load(self, version: int) -> float:
        """Load the weights into all servers at once, or, where sampling goes on all the time, into one after another; return
        the seconds that it took."""
        servers, each = self.floor.servers, max(0.0, self.costs.trainer.update - self.costs.trainer.export)
        taken = 0.0
        for held in [[server] for server in servers] if self.schedule.max_staleness else [servers]:
            for server in held:
                server.paused = True
            taken += self._pass(each)
            for server in held:
                server.paused, server.version = False, version
                server.drop()
        return taken

    def _pass(self, seconds: float) -> float:
        end = self.kernel.now + seconds
        self.kernel.after(seconds, lambda: None)
        self.until(lambda: self.kernel.now >= end)
        return seconds

    def _measure(self, seconds: float) -> None:
        meter = self.meter
        meter.seconds += seconds
        for server in self.floor.servers:
            if server.busy and not server.paused:
                meter.server += seconds
                meter.batch += seconds * server.batch
        meter.places += seconds * self.floor.rollouts
        meter.trainer += seconds * self.training
        meter.agents += seconds * self.floor.agents_busy


class _Turns(_Loop):
    """The loop that samples and trains in turns."""

    def collect(self, step: int) -> list[_Group]:
        """Run the groups of a step to their end; with dynamic sampling in waves, until enough of them teach."""
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
    """The loop that samples all the time, also while it trains."""

    def __init__(self, schedule: Schedule, costs: Costs, teams: Iterator[Team]) -> None:
        super().__init__(schedule, costs, teams)
        self._pacer = Pacer(schedule.tasks_per_step, schedule.max_staleness, schedule.steps)
        self._groups: dict[str, _Group] = {}
        self._begun, self._news = 0, True
        self.fill()

    def collect(self, step: int) -> list[_Group]:
        """Wait until the `Pacer` picks the groups of a step; groups that teach nothing are returned besides them."""
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

    def served(self, version: int) -> None:
        """Advance the `Pacer`, and begin the groups of another step."""
        self._pacer.advance(version)
        self._news = True
        self.fill()

    def refill(self) -> bool:
        """Begin a group if the bound on staleness allows; return whether one began."""
        if not self._pacer.room:
            return False
        name = str(self._begun)
        self._begun += 1
        self._groups[name] = self.open(next(self.teams))
        self._pacer.begin(name)
        return True

    def ended(self, group: _Group) -> None:
        """Tell the `Pacer` that a group has ended."""
        name = next(name for name, known in self._groups.items() if known is group)
        self._pacer.finish(name)
        self._news = True

    def _drop_useless(self, dropped: list[_Group], most: int) -> None:
        """Take finished groups that teach nothing, `most` in all, without counting them for the step."""
        for open_group in self._pacer.open_groups:
            if len(dropped) >= most:
                return
            group = self._groups[open_group.id]
            if open_group.finished and not group.team.teaches:
                self._pacer.drop(open_group.id)
                dropped.append(self._groups.pop(open_group.id))
                self.fill()

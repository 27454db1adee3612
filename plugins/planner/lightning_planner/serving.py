"""The simulated policy server and agents, on discrete events: what happens to a rollout between its beginning and its end.

The invariant: work is conserved. A job of so many units on a clock ends when the clock has run exactly as far, however often
its rate changed meanwhile; so a change of rate costs nothing for the jobs that it concerns. What takes part shares as `Sharing`
says, at every moment: rates are set anew whenever somebody begins or ends to work. A call is admitted in the order in which it
came to the server, and holds its place there to its end.

Jobs that share something at the same speed (sequences in one batch, threads on the same cores) share one `Clock`: it runs in
units of work for each of them, and they end in the order of where they end on it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_planner.costs import Agent, Call, Costs, ServerCosts

Action = Callable[[], None]


class Clock:
    """Units of work done so far by each job on it. `rate` is in units per second and may be changed at any moment."""

    __slots__ = ("_jobs", "_numbers", "done", "rate")

    def __init__(self, rate: float = 0.0) -> None:
        self.done, self.rate = 0.0, rate
        self._jobs: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, units: float, action: Action) -> None:
        """Call `action` when so many units are done from now on."""
        heapq.heappush(self._jobs, (self.done + units, next(self._numbers), action))

    def seconds(self) -> float:
        """Until the next job ends at the present rate; infinite when none will."""
        if not self._jobs or self.rate <= 0.0:
            return math.inf
        return max(0.0, (self._jobs[0][0] - self.done) / self.rate)

    def run(self, seconds: float) -> None:
        """Let time go by."""
        self.done += seconds * self.rate

    def end(self) -> Action:
        """Take the next job from the clock, which is where it ends now; returns what is to be called."""
        units, _, action = heapq.heappop(self._jobs)
        self.done = units
        return action


class Kernel:
    """Time, in seconds, and everything that happens in it. No randomness: the same jobs give the same times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waits = Clock(1.0)
        self._clocks = [self._waits]
        self.before: Callable[[float], None] = lambda seconds: None
        """Called with the seconds that are about to go by, while everything is as it was in them."""

    def clock(self) -> Clock:
        """A new clock, which stands still until it has a rate."""
        clock = Clock()
        self._clocks.append(clock)
        return clock

    def after(self, seconds: float, action: Action) -> None:
        """Call `action` when so many seconds have gone by."""
        self._waits.begin(seconds, action)

    def step(self) -> bool:
        """Go to the next event and let it happen; False when none is left."""
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
"""Seconds that a token takes at least, so that a server that costs nothing has a rate."""


@dataclass(slots=True)
class _Waiting:
    """A call that came to a server, and what is to be called when it ends and, before, when its first token is due."""

    call: Call
    begun: Action
    ended: Action


class Server:
    """The policy server. `speed` is its share of what it runs on; `paused` while it gets new weights."""

    def __init__(self, kernel: Kernel, costs: ServerCosts) -> None:
        self._costs = costs
        self._prompts, self._tokens = kernel.clock(), kernel.clock()
        self._line: deque[_Waiting] = deque()
        self._calls, self._held, self._stall = 0, 0, 0.0
        self.speed, self.paused = 1.0, False

    @property
    def busy(self) -> bool:
        """Whether it computes, or would if it were not paused."""
        return bool(len(self._prompts) or len(self._tokens))

    @property
    def batch(self) -> int:
        """Sequences that are being decoded."""
        return len(self._tokens)

    def submit(self, call: Call, begun: Action, ended: Action) -> None:
        """A call comes: `begun` is called before its first token, `ended` after its last."""
        self._line.append(_Waiting(call, begun, ended))
        self._admit()

    def retune(self) -> None:
        """Set the rates anew: somebody began or ended."""
        on = 0.0 if self.paused else self.speed
        self._prompts.rate = on
        every = self._costs.token + self._costs.token_per_call * len(self._tokens)
        self._tokens.rate = 0.0 if len(self._prompts) else on / max(every, LEAST)

    def _admit(self) -> None:
        costs = self._costs
        while self._line:
            waiting = self._line[0]
            size = waiting.call.prompt + waiting.call.response
            if self._calls and (self._calls >= costs.max_calls or self._held + size > costs.kv_tokens):
                return
            self._line.popleft()
            self._calls, self._held = self._calls + 1, self._held + size
            # Prompts are computed one after the other: each ends on its clock after all that came before it.
            end = max(self._stall, self._prompts.done) + costs.request + costs.prompt_token * waiting.call.fresh
            self._stall = end
            self._prompts.begin(end - self._prompts.done, lambda waiting=waiting: self._decode(waiting))  # type: ignore[misc]

    def _decode(self, waiting: _Waiting) -> None:
        waiting.begun()
        self._tokens.begin(waiting.call.response, lambda: self._end(waiting))

    def _end(self, waiting: _Waiting) -> None:
        self._calls, self._held = self._calls - 1, self._held - waiting.call.prompt - waiting.call.response
        self._admit()
        waiting.ended()


@dataclass(slots=True, eq=False)
class Running:
    """A rollout on its way. `versions` are the policy's, one for each call in the order they began, with its tokens."""

    agent: Agent
    finished: Action
    left: int
    versions: list[tuple[int, int]] = field(default_factory=list)


class Floor:
    """Where rollouts happen: cores for the agents, and the policy server. `training` says whether the trainer computes,
    `rollouts` how many are under way."""

    def __init__(self, kernel: Kernel, costs: Costs, version: Callable[[], int]) -> None:
        self._kernel, self._costs, self._version = kernel, costs, version
        self._thinking = kernel.clock()
        self.training = kernel.clock()
        self.server = Server(kernel, costs.server)
        self.rollouts = 0

    def start(self, agent: Agent, finished: Callable[[Running], None]) -> None:
        """Begin a rollout; `finished` is called at its end."""
        self.rollouts += 1
        running = Running(agent, lambda: None, len(agent.calls))

        def ended() -> None:
            self.rollouts -= 1
            finished(running)

        running.finished = ended
        if agent.calls:
            self._follow(running, -1)
        else:
            self._kernel.after(0.0, ended)

    def dispatch(self, action: Action) -> None:
        """What the agents' machines do between two rollouts; then `action` is called."""
        self._thinking.begin(self._costs.dispatch, action)

    def retune(self) -> None:
        """Set all rates anew. To be called after every event."""
        sharing, training = self._costs.sharing, bool(len(self.training))
        threads = len(self._thinking) + (training and sharing.trainer_with_agents)
        alone = min(1.0, sharing.agents / threads) if threads else 1.0
        self._thinking.rate = alone
        busy = self.server.busy and not self.server.paused
        device = 0.5 if sharing.one_device and training and busy else 1.0
        self.training.rate = device * (alone if sharing.trainer_with_agents else 1.0)
        self.server.speed = device
        self.server.retune()

    def _follow(self, running: Running, index: int) -> None:
        """Begin what waited for a call."""
        for place, call in enumerate(running.agent.calls):
            if call.after == index:
                self._kernel.after(call.wait, lambda place=place: self._think(running, place))  # type: ignore[misc]

    def _think(self, running: Running, place: int) -> None:
        self._thinking.begin(running.agent.calls[place].work, lambda: self._call(running, place))

    def _call(self, running: Running, place: int) -> None:
        call = running.agent.calls[place]

        def begun() -> None:
            running.versions.append((self._version(), call.response))

        def ended() -> None:
            self._kernel.after(self._costs.server.latency, lambda: self._returned(running, place))

        self.server.submit(call, begun, ended)

    def _returned(self, running: Running, place: int) -> None:
        running.left -= 1
        if running.left:
            self._follow(running, place)
        else:
            self._kernel.after(running.agent.wait, lambda: self._thinking.begin(running.agent.work, running.finished))

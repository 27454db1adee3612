"""The inputs of the simulation, from a record or from formulas: the costs, and the work of agents as far as it takes time.

The invariant: every cost has a unit; a cost of 0 means that the thing takes no time, never that it is unknown. A rollout's
calls depend on one another as in the record: each begins a certain time after the end of the call that it followed. The
simulation finds out how long a call takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """The costs of one policy server. With n sequences in its batch each of them gets a token every `token + n *
    token_per_call` s.

    A new call stops decoding for `request + fresh * prompt_token` s (`fresh` are the prompt's tokens that the prefix cache does
    not have), and takes `latency` s outside the server: network, gateway, client. The batch has at most `max_calls` calls and
    `kv_tokens` tokens of prompts and responses; further calls wait. Where `kv_tokens` is known, a conversation is in the prefix
    cache from its last call on, as long as the cache has room; later ones displace it, and an update drops all of them.
    """

    token: float
    token_per_call: float = 0.0
    request: float = 0.0
    prompt_token: float = 0.0
    latency: float = 0.0
    max_calls: float = math.inf
    kv_tokens: float = math.inf


@dataclass(frozen=True, slots=True)
class GatewayCosts:
    """A call takes `call` seconds of CPU in one of `processes` processes, each of which has a core of its own."""

    call: float = 0.0
    processes: int = 1

    @property
    def most(self) -> float:
        """The calls a second that the processes can take."""
        return self.processes / self.call if self.call else math.inf


@dataclass(frozen=True, slots=True)
class TrainerCosts:
    """The trainer's costs in seconds. Training a step with `rows` tokens in its rows takes `step + rows * row_token`, the first
    step `first` more. A checkpoint takes `checkpoint`. An update of the policy server takes `update`; during the first `export`
    of these seconds the trainer writes the weights and calls go on, then they stand still."""

    step: float
    row_token: float
    checkpoint: float = 0.0
    update: float = 0.0
    export: float = 0.0
    first: float = 0.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """What the agents, the trainer and the policy server share. All agents together do at most `agents` seconds of work in a
    second, and each at most one. With `trainer_with_agents` the trainer's thread is one more on the agents' machines. With
    `one_device` policy server and trainer have the same GPUs, and each runs at half speed while both work."""

    agents: float = math.inf
    trainer_with_agents: bool = False
    one_device: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """All costs. The policy has `servers` servers that cost alike. `dispatch` is the work of the agents' machines between two
    rollouts on a place, in seconds. `turn` is the time of a step in turns besides its rollouts, in seconds: creating them and
    reading them back."""

    server: ServerCosts
    trainer: TrainerCosts
    sharing: Sharing = field(default_factory=Sharing)
    dispatch: float = 0.0
    turn: float = 0.0
    servers: int = 1
    gateway: GatewayCosts = GatewayCosts()


@dataclass(frozen=True, slots=True)
class Schedule:
    """The settings of the simulated loop, by their names in the configuration, and the number of `steps` to simulate."""

    tasks_per_step: int
    group_size: int
    concurrency: int
    max_staleness: int = 0
    steps: int = 20
    checkpoint_every: int = 1
    dynamic_sampling: bool = False
    max_waves: int = 4


@dataclass(frozen=True, slots=True)
class Call:
    """A model call. It follows the call with the index `after` (-1: the rollout's beginning). Before it the agent first waits
    `wait` seconds (its tools work elsewhere), and then computes for `work` core-seconds.

    `prompt` and `response` are numbers of tokens; `fresh` are the prompt's tokens that no earlier call had. `tools` is how many
    tools the agent ran before the call.
    """

    after: int
    wait: float
    work: float
    prompt: int
    fresh: int
    response: int
    tools: int = 0


@dataclass(frozen=True, slots=True)
class Agent:
    """One rollout. `rows` are the tokens of its training rows, 0 when it is not trained on. After its last call it waits and
    works for `wait` and `work` more seconds, as before a call."""

    calls: tuple[Call, ...]
    rows: int
    wait: float = 0.0
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class Team:
    """The rollouts of one group. `teaches` is true when a step was trained on it (equal rewards teach nothing)."""

    agents: tuple[Agent, ...]
    teaches: bool = True


@dataclass(frozen=True, slots=True)
class Changes:
    """How the planned work differs from the recorded work: every tool takes `tool_scale` times as long plus `tool_seconds`, and
    all numbers of tokens are multiplied by `token_scale`."""

    tool_seconds: float = 0.0
    tool_scale: float = 1.0
    token_scale: float = 1.0

    def apply(self, team: Team) -> Team:
        """Return the group with these changes."""
        return replace(team, agents=tuple(self._agent(agent) for agent in team.agents))

    def _agent(self, agent: Agent) -> Agent:
        calls = tuple(self._call(call) for call in agent.calls)
        return replace(agent, calls=calls, rows=round(agent.rows * self.token_scale))

    def _call(self, call: Call) -> Call:
        wait = call.wait
        if call.tools:
            wait = wait * self.tool_scale + call.tools * self.tool_seconds
        prompt, fresh = round(call.prompt * self.token_scale), round(call.fresh * self.token_scale)
        response = max(1, round(call.response * self.token_scale)) if call.response else 0
        return replace(call, wait=wait, prompt=prompt, fresh=fresh, response=response)


def draw(teams: Sequence[Team], size: int, seed: int) -> Iterator[Team]:
    """Yield groups of `size` without end. Each is a random recorded group with all its rollouts; if it has another size, its
    rollouts are drawn with replacement, so that a group's rollouts stay alike."""
    random = np.random.default_rng(seed)
    while True:
        team = teams[int(random.integers(len(teams)))]
        if len(team.agents) == size:
            yield team
        else:
            chosen = random.integers(len(team.agents), size=size)
            yield replace(team, agents=tuple(team.agents[int(index)] for index in chosen))

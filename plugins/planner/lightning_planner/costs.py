"""What the simulation runs on, wherever it is from: what things cost, and what agents do, as far as time is concerned.

The invariant: every cost says its unit; a cost of 0 means that the thing takes no time, never that it is unknown. A rollout's
calls depend on one another as they did when it was recorded: each begins so long after the end of the one that it followed. How
long a call takes is what the simulation finds out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """One policy server. With n sequences in its batch every one of them gets a token each `token + n * token_per_call` s.

    A call that arrives takes `request + fresh * prompt_token` s in which nothing is decoded (`fresh` are the prompt's tokens
    that the prefix cache does not have), and `latency` s beside the server: network, gateway, client. No more than
    `max_calls` are in the batch, and no more than `kv_tokens` of prompts and responses; others wait in line.
    """

    token: float
    token_per_call: float = 0.0
    request: float = 0.0
    prompt_token: float = 0.0
    latency: float = 0.0
    max_calls: float = math.inf
    kv_tokens: float = math.inf


@dataclass(frozen=True, slots=True)
class TrainerCosts:
    """Seconds of a step's training (`step + rows * row_token`, for `rows` tokens in its rows; that of the first step takes
    `first` more), of a checkpoint, of the update of the policy server: for `export` of them the trainer writes the weights and
    calls go on, in the others they stand still."""

    step: float
    row_token: float
    checkpoint: float = 0.0
    update: float = 0.0
    export: float = 0.0
    first: float = 0.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who shares what. Agents compute on machines that do `agents` seconds of their work in a second, all of them together, and
    none faster than alone. The trainer's thread is one more on these machines where `trainer_with_agents`. With `one_device`
    policy server and trainer have the same GPUs, each at half speed while both work."""

    agents: float = math.inf
    trainer_with_agents: bool = False
    one_device: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """All of them. `dispatch` is the agents' machines' work between two rollouts on a place, in seconds; `turn` what a step in
    turns takes beside its rollouts, in seconds: they are created and read back."""

    server: ServerCosts
    trainer: TrainerCosts
    sharing: Sharing = field(default_factory=Sharing)
    dispatch: float = 0.0
    turn: float = 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The settings of the loop that is simulated, by their names in the configuration, and `steps` to simulate."""

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
    """A model call: it follows the call with the index `after` (-1: the rollout's beginning) by `wait` seconds in which the
    agent needs nothing (its tools work elsewhere) and then `work` core-seconds in which it computes.

    `prompt` and `response` are tokens; `fresh` are those of the prompt that no call before had; `tools` is how many tools
    the agent ran before it.
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
    """One rollout. `rows` are the tokens of the training rows it becomes, 0 when it is not trained on. After its last call it
    waits and works so many seconds more, as before a call."""

    calls: tuple[Call, ...]
    rows: int
    wait: float = 0.0
    work: float = 0.0


@dataclass(frozen=True, slots=True)
class Team:
    """The rollouts of one group; `teaches` when a step was trained on it (all rewards equal teach nothing)."""

    agents: tuple[Agent, ...]
    teaches: bool = True


@dataclass(frozen=True, slots=True)
class Changes:
    """How the work to be planned for differs from the recorded: every tool takes `tool_scale` times as long and then
    `tool_seconds` more, and all numbers of tokens are multiplied by `token_scale`."""

    tool_seconds: float = 0.0
    tool_scale: float = 1.0
    token_scale: float = 1.0

    def apply(self, team: Team) -> Team:
        """The group as it would be."""
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
    """Groups of `size` without end: each time a recorded one at random with its own rollouts, drawn again where its size is
    another, so that what is alike in a group stays together."""
    random = np.random.default_rng(seed)
    while True:
        team = teams[int(random.integers(len(teams)))]
        if len(team.agents) == size:
            yield team
        else:
            chosen = random.integers(len(team.agents), size=size)
            yield replace(team, agents=tuple(team.agents[int(index)] for index in chosen))

"""What agents do, as far as time is concerned: calls, and what they do between calls.

The invariant: a rollout's calls depend on one another as they did when it was recorded: each begins so long after the end of
the one that it followed. Nothing here knows how long a call takes; that is what the simulation finds out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np


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

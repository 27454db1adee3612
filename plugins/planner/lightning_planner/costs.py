"""What things cost: the numbers that the simulation runs on, wherever they are from.

The invariant: every cost says its unit; a cost of 0 means that the thing takes no time, never that it is unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


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

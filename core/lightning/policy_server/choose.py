"""Which policy server a configuration asks for.

The invariant: nothing is started or asked here.
"""

from __future__ import annotations

from pathlib import Path

from lightning.config.sections import PolicyServerConfig
from lightning.policy_server.attached import AttachedVLLM
from lightning.policy_server.auto_settings import DEFAULT_DEMAND, Demand
from lightning.policy_server.protocol import PolicyServer
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.policy_server.weight_transfer.layout import Sender


def make_policy_server(
    model: Path,
    config: PolicyServerConfig,
    *,
    log: Path,
    version: int = 0,
    claims: bool = True,
    sender: Sender | None = None,
    demand: Demand = DEFAULT_DEMAND,
) -> PolicyServer:
    """The server that `config` asks for, not started yet: ours (`log` gets its output), or the one at `config.attach`.

    Without `claims` none is given new weights: an attached one is used as it is, and somebody else may train it. Over the
    network `sender` sends weights; without one this process does. Ours is made for the `demand`.
    """
    if config.attach:
        return AttachedVLLM(model, config, claims=claims, sender=sender)
    return OwnedVLLM(model, config, log=log, version=version, updates=claims, sender=sender, demand=demand)

"""The plugin `attach`: policy servers at an HTTP URL, and weights over the network. Torch is imported only where weights are
sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.errors import ConfigError
from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.policy_server.protocol import PolicyServer
    from lightning.policy_server.weights import WeightTransfer


@hookimpl
def register_policy_servers(
    register: Callable[[str, Callable[[Path, Config, WeightTransfer, bool], PolicyServer]], None],
) -> None:
    """Register policy servers for URLs of `http` and `https`: a vLLM that somebody else runs."""
    register("http", attached)
    register("https", attached)


@hookimpl
def register_weight_transfers(
    register: Callable[[str, Callable[[Config, object | None], WeightTransfer]], None],
) -> None:
    """Register the weight transfers `gloo` and `nccl`."""
    from lightning_attach.sending import BACKENDS

    for backend in BACKENDS:
        register(backend, partial(over_network, backend))


def attached(model: Path, config: Config, transfer: WeightTransfer, claims: bool) -> PolicyServer:
    """Make the policy server for the vLLM at `policy_server.attach`. With `claims` this process alone changes its weights."""
    from lightning_attach.attached import AttachedVLLM

    return AttachedVLLM(model, config.policy_server, transfer, claims=claims)


def over_network(backend: str, config: Config, sender: object | None) -> WeightTransfer:
    """Make the transfer of weights over `backend`. `sender` is the engine's process that sends; None: this process sends, over
    NCCL from the GPU it trains on. Raises `ConfigError` for an engine that cannot send."""
    from lightning_attach.sending import Sender
    from lightning_attach.transfer import LocalSender, OverNetwork

    found = LocalSender(config.engine.device) if sender is None else sender
    if not isinstance(found, Sender):
        raise ConfigError(
            f"policy_server.weight_transfer = {backend!r} needs an engine whose process can send weights, and a "
            f"{type(found).__name__} cannot: set it to 'file', where vLLM sees the files that the engine writes"
        )
    return OverNetwork(backend, found, config.policy_server.transfer_timeout)

"""The policy server room: one vLLM, owned or attached, that takes new weights while it runs.

The invariant: importing this package costs nothing, since vLLM's own processes import it too, for `launch` and `worker`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.policy_server.attached import AttachedVLLM, make_policy_server
    from lightning.policy_server.vllm_server import OwnedVLLM

__all__ = ["AttachedVLLM", "OwnedVLLM", "make_policy_server"]

_HOMES = {
    "AttachedVLLM": "attached",
    "OwnedVLLM": "vllm_server",
    "make_policy_server": "attached",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

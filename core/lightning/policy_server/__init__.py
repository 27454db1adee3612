"""The policy server room: one vLLM, that takes new weights while it runs.

The invariant: importing this package costs nothing, since vLLM's own processes import it too, for `launch` and `worker`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.policy_server.vllm_server import OwnedVLLM, check_policy_server, make_policy_server

__all__ = ["OwnedVLLM", "check_policy_server", "make_policy_server"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.vllm_server"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

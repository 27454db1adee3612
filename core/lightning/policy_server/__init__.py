"""The policy server room: one vLLM, owned or attached, that takes new weights while it runs.

The invariant: importing this package costs nothing, since vLLM's own processes import it too, for `launch` and `worker`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.policy_server.vllm_server import AttachedVLLM, OwnedVLLM, make_policy_server, served_version

__all__ = ["AttachedVLLM", "OwnedVLLM", "make_policy_server", "served_version"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from lightning.policy_server import vllm_server

        return getattr(vllm_server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The OpenAI-compatible front of the policy: signed tokens in, vLLM's answers out, every call a durable transition.

`Gateway` is the room's door; an API shape is a module in `dialects`.
"""

from lightning.gateway.gateway import Gateway
from lightning.gateway.upstream import Upstream

__all__ = ["Gateway", "Upstream"]

"""Lightning Server: the control API, the gateway and the policy server, for agents and trainers that run elsewhere.

The invariant: importing this package imports none of its rooms, since the trainer embeds some of them and others import the
trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.server.serving import RunningServer, serve

__all__ = ["RunningServer", "serve"]


def __getattr__(name: str) -> object:
    """`RunningServer` and `serve`, imported when they are first asked for."""
    if name in __all__:
        from lightning.server import serving

        return getattr(serving, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The plugin `session`: what `Trainer.session` opens, for a training loop of your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl, made_later

if TYPE_CHECKING:
    from lightning.hooks import MakeSession


@hookimpl
def register_sessions(register: Callable[[str, MakeSession], None]) -> None:
    """Register `session`."""
    register("session", made_later("lightning_session.session:opened_session"))

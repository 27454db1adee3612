"""Registers lightning's own credit functions; they come with the plugin `algorithms`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.hooks import hookimpl

if TYPE_CHECKING:
    from lightning.credit.protocol import Credit


@hookimpl
def register_credits(register: Callable[[str, Credit], None]) -> None:
    """`identical` (the default), `discounted` and `intermediate`."""
    from lightning.credit.assign import Discounted, identical
    from lightning.credit.intermediate import Intermediate

    register("identical", identical)
    register("discounted", Discounted())
    register("intermediate", Intermediate())

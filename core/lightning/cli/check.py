"""A finding of `lightning doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "missing", "broken", "low"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `needed` means that `lightning demo` cannot run unless it is ok."""

    name: str
    status: Status
    detail: str
    cure: str = ""
    needed: bool = False

    @property
    def fatal(self) -> bool:
        """Whether `lightning demo` cannot run because of this."""
        return self.needed and self.status != "ok"

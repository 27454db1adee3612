"""How a project's names of resources lie in the store: resources have no project of their own, so their names say it.

The invariant: two projects can use one name and never mean the same thing; what goes in comes out as it was. The default
project's resources keep their bare names, because runs that know nothing of projects made them.
"""

from __future__ import annotations

from typing import Final

from lightning.errors import DataError
from lightning.types import DEFAULT_PROJECT

RESERVED: Final = "project::"
"""Begins the stored name of every resource of a project that has a name."""


class ProjectNames:
    """The names of one project."""

    def __init__(self, project: str) -> None:
        self._before = "" if project == DEFAULT_PROJECT else f"{RESERVED}{project}::"

    def may_have(self, name: str) -> bool:
        """Whether a resource can be called so here."""
        return not name.startswith(RESERVED)

    def owns(self, stored: str) -> bool:
        """Whether the resource stored under this name is one of the project's."""
        return stored.startswith(self._before) if self._before else self.may_have(stored)

    def stored(self, name: str) -> str:
        """The name to store. Raises `DataError` for a reserved one."""
        if not self.may_have(name):
            raise DataError(
                f"the resource {name!r} cannot be called so: names that begin with {RESERVED!r} are reserved"
            )
        return self._before + name

    def seen(self, stored: str) -> str:
        """The project's own name of a resource stored under this one."""
        return stored.removeprefix(self._before)

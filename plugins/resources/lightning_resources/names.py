"""A project's names of resources in the store: resources have no project there, so their stored names contain it.

The invariant: two projects can use one name for different resources, and a stored name is turned back into the same name. The
default project's resources keep their bare names, because runs without a project made them.
"""

from __future__ import annotations

from typing import Final

from lightning.errors import DataError
from lightning.types import DEFAULT_PROJECT

RESERVED: Final = "project::"
"""Prefix of the stored name of every resource whose project is not the default one."""


class ProjectNames:
    """Translates the names of one project's resources."""

    def __init__(self, project: str) -> None:
        self._before = "" if project == DEFAULT_PROJECT else f"{RESERVED}{project}::"

    def may_have(self, name: str) -> bool:
        """Whether a resource of the project may have this name; reserved names may not."""
        return not name.startswith(RESERVED)

    def owns(self, stored: str) -> bool:
        """Whether the resource with this stored name belongs to the project."""
        return stored.startswith(self._before) if self._before else self.may_have(stored)

    def stored(self, name: str) -> str:
        """Return the stored name of a resource. Raises `DataError` for a reserved name."""
        if not self.may_have(name):
            raise DataError(
                f"the resource {name!r} cannot be called so: names that begin with {RESERVED!r} are reserved"
            )
        return self._before + name

    def seen(self, stored: str) -> str:
        """Return the project's own name of a resource with this stored name."""
        return stored.removeprefix(self._before)

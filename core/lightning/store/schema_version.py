"""The schema of every store: which one this is, and what is said of a database that has another.

The invariant: there is one schema. A database of another one is refused, untouched, in the same words whichever database it is.
"""

from __future__ import annotations

from typing import Final

from lightning.errors import SchemaError
from lightning.installation import other_format

SCHEMA: Final = 5
"""What stores keep, and how: the tables and columns, or keys, and what is in them."""


def refuse_other_schema(where: str, found: object) -> None:
    """Raise `SchemaError` unless this is the schema that a database has. `where` names the database."""
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise SchemaError(f"{where} has a damaged schema version ({found!r}): restore it from a backup")
    if found != SCHEMA:
        raise SchemaError(other_format(f"{where} has schema {found}", f"schema {SCHEMA}"))

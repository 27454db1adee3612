"""The state of rollouts: what scripts keep of them, as nouns.

The invariant: Python writes the fixed data of a rollout, which scripts do not read; scripts write what changes. Numbers that
must not lose a digit are kept as text, since Lua keeps fourteen digits.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from lightning.errors import StoreError
from lightning.store import rows
from lightning.store.rollout_state import Position
from lightning.types import Rollout, Status

_CREATED: Final = tuple(name for name in rows.ROLLOUTS.fields if name not in rows.EARNED)
"""The fields of a rollout in `columns_of`, in its order."""


def columns_of(rollout: Rollout) -> str:
    """Return the fixed data of a rollout as text. Raises `DataError` unless the rollout is new."""
    return rows.dump(list(rows.rollout_values(rollout)))


def uses_of(rollout: Rollout) -> str:
    """Return the name under which the rollout counts as a use of resources; empty when it uses none."""
    if not rollout.resources:
        return ""
    versions = rows.resources_to_text(rollout.resources, f"the resources of rollout {rollout.id!r}")
    return rows.dump([rollout.run, rollout.split, versions])


class Home(NamedTuple):
    """A rollout's run, its group, and the key of the call that it branches (None: it is no branch)."""

    run: str
    group: str
    parent: tuple[str, int, int] | None


def home_of(columns: bytes, rollout: str) -> Home:
    """Read where a rollout belongs from the text of `columns_of`."""
    kept = _created(columns, rollout)
    try:
        parent = rows.call_from_text(kept["parent"], "its parent")
    except (StoreError, ValueError, TypeError):  # damaged: reading the rollout itself raises the error
        parent = None
    return Home(kept["run"], kept["group"], parent)


def read_rollout(columns: bytes, standing: bytes, rollout: str) -> Rollout:
    """Read a rollout from its fixed data and its state. Raises `StoreError` when they are damaged."""
    found, kept = stand(standing, rollout), _created(columns, rollout)
    try:
        kept |= {
            "status": found["status"],
            "attempt": found["attempt"],
            "reward": float(found["reward"]) if "reward" in found else None,
            "rewards": found.get("rewards", "{}"),
            "fault": found.get("fault", ""),
            "error": found.get("error", ""),
            "seconds": float(found.get("seconds", 0.0)),
            "trained_at_step": int(found["trained"]) if "trained" in found else None,
        }
        return rows.ROLLOUTS.read([kept[name] for name in rows.ROLLOUTS.fields])
    except (ValueError, TypeError, KeyError) as error:
        raise _corrupt(rollout, error) from error


def position_of(standing: bytes, rollout: str) -> Position:
    """Read a rollout's position for the rules of `rollout_state`."""
    found = stand(standing, rollout)
    try:
        return Position(rollout, Status(found["status"]), found["attempt"], found["spent"], found["max"])
    except (ValueError, TypeError, KeyError) as error:
        raise _corrupt(rollout, error) from error


def stand(standing: bytes, rollout: str) -> dict[str, Any]:
    """Read the state that scripts keep of a rollout. Raises `StoreError` when it is damaged."""
    found = rows.load(standing.decode(errors="replace"), f"the standing of rollout {rollout!r}")
    if not isinstance(found, dict):
        raise _corrupt(rollout, "expected an object")
    return found


def listed(text: str, what: str) -> list[Any]:
    """Read a list from JSON. Raises `StoreError` when it is damaged."""
    found = rows.load(text, what)
    if not isinstance(found, list):
        raise StoreError(f"{what} is corrupt in the database: expected a list. Restore the database from a backup")
    return found


def _created(columns: bytes, rollout: str) -> dict[str, Any]:
    try:
        return dict(zip(_CREATED, listed(columns.decode(errors="replace"), f"rollout {rollout!r}"), strict=True))
    except ValueError as error:
        raise _corrupt(rollout, error) from error


def _corrupt(rollout: str, why: object) -> StoreError:
    return StoreError(f"rollout {rollout!r} is corrupt in the database: {why}. Restore the database from a backup")

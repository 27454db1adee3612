"""What a loop of your own keeps with its steps: a state, the rates that it has set, and metrics.

The invariant: state and rates are written by the commit of a step, and by nothing else. So a run that goes on finds those of
its last step, whatever ended the process before.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from lightning.errors import DataError, StoreError
from lightning.losses.protocol import TAKEN
from lightning.trainer.metrics import UNTRAINED
from lightning.trainer.stages import NOT_NAMES
from lightning.trainer.weight_sync import HELD_SECONDS
from lightning.types import Json, StepRecord, not_json

logger = logging.getLogger(__name__)

EXTRA: Final = "session"
"""The name of the extra of a step that has state and rates."""
LARGEST_STATE: Final = 1 << 20
"""The most bytes of a state, as JSON in UTF-8: each step keeps one."""
OF_LOSSES: Final = (
    "approx_kl", "clip_fraction", "correction_weight", "dual_clip_fraction", "entropy", "masked_share", "old_logprob_share",
    "ratio", "ratio_max", "reference_kl", "rho", "rho_squared", "truncated_share",
)  # fmt: skip
"""The metrics of lightning's losses."""
OF_STEPS: Final = (
    "groups_asked_again", "groups_too_old", HELD_SECONDS, "overlap_seconds", "policy", "probe_gap", "probe_gap_mean", "reused",
    "server", UNTRAINED.rstrip("/"),
)  # fmt: skip
"""The beginnings of a step's other metrics, also of those that only some steps have."""
OTHERS: Final = frozenset((*NOT_NAMES, *TAKEN, *OF_LOSSES, *OF_STEPS))
"""The beginnings of metrics that are lightning's own."""


def state_bytes(state: Json | bytes) -> bytes:
    """Return a state as it is kept. Raises `DataError` for what JSON cannot hold, and for too many bytes."""
    if not isinstance(state, bytes) and (found := not_json(state)):
        place, problem = found
        raise DataError(
            f"session.state is not JSON: its value{place[:60]} {problem}. Give null, booleans, finite numbers, strings, lists "
            "and mappings from strings, or bytes of your own"
        )
    data = state if isinstance(state, bytes) else json.dumps(state).encode()
    if len(data) > LARGEST_STATE:
        raise DataError(
            f"session.state has {len(data)} bytes, and each step keeps at most {LARGEST_STATE}: keep the rest in a file of "
            "your own, and the file's name here"
        )
    return data


def packed(state: Json | bytes, rates: Mapping[str, float]) -> dict[str, bytes]:
    """Return the extra of a step: a line of JSON with the rates, then the state. Empty without both. Raises what `state_bytes`
    raises."""
    if state is None and not rates:
        return {}
    head = json.dumps({"rates": dict(rates), "bytes": isinstance(state, bytes)})
    return {EXTRA: head.encode() + b"\n" + state_bytes(state)}


def unpacked(record: StepRecord | None) -> tuple[Json | bytes, dict[str, float]]:
    """Return state and rates that a step keeps; None and no rates for a step without them. Raises `StoreError` for what cannot
    be read."""
    if record is None or (kept := record.extras.get(EXTRA)) is None:
        return None, {}
    line, _, data = kept.partition(b"\n")
    try:
        head = json.loads(line)
        rates = {str(name): float(rate) for name, rate in head["rates"].items()}
        return (data if head["bytes"] else json.loads(data)), rates
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"the session's state of step {record.step} cannot be read ({type(error).__name__}: {error}). Restore the database "
            "from a backup"
        ) from error


def own_metrics(given: Mapping[str, float], taken: Iterable[str]) -> dict[str, float]:
    """Return metrics that a loop gives. `taken` are names of metrics and stages that others have. Raises `DataError` for a name
    that is not `PREFIX/NAME`, or whose prefix others have, and for a value that is no finite number."""
    prefixes = _prefixes(taken)
    for name, value in given.items():
        prefix, _, rest = name.partition("/") if isinstance(name, str) else ("", "", "")
        if not prefix or not rest or not name.isprintable():
            raise DataError(f"the metric {name!r} needs a prefix of your own: name it 'mine/{name}'")
        if _is_taken(name, prefixes):
            raise DataError(
                f"the metric {name!r} begins as metrics of lightning or of a plugin do ({prefix}/...): give it another prefix, "
                f"such as 'mine/{rest}'"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"the metric {name!r} is {value!r} and no finite number: leave out what was not measured")
    return {name: float(value) for name, value in given.items()}


def without_taken(logged: Mapping[str, float], taken: Iterable[str]) -> dict[str, float]:
    """Return the metrics of a loop without those whose prefix others have since they were logged, with a warning of these."""
    prefixes = _prefixes(taken)
    if left_out := [name for name in logged if _is_taken(name, prefixes)]:
        logger.warning(
            "the metrics %s are left out of the step: a metric of lightning or of a plugin begins like them. Give them a "
            "prefix of your own, such as mine/...",
            ", ".join(left_out),
        )
    return {name: value for name, value in logged.items() if name not in left_out}


def _prefixes(taken: Iterable[str]) -> frozenset[str]:
    return OTHERS.union(name.partition("/")[0] for name in taken)


def _is_taken(name: str, prefixes: Collection[str]) -> bool:
    prefix = name.partition("/")[0]
    return prefix in prefixes or prefix.startswith("server_")

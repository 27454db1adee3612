"""A call as Redis stores it: its digest, its columns as JSON with its parent's key, its compressed tokens.

The invariant: a call is decoded against the parent it was encoded against, and a damaged or edited call is noticed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from lightning.errors import DataError, StoreError
from lightning.store import codec, rollout_state, rows
from lightning.store.codec import Fingerprint, KnownTransition
from lightning.types import Transition

from lightning_redis.keys import encoded

CallKey: TypeAlias = tuple[str, int, int]
"""The key of a call: rollout, attempt and seq."""
DIGEST_BYTES: Final = codec.DIGEST_BYTES
EXTRAS: Final = rows.CALLS.fields.index("extras") - 1
"""The column of the extras. The JSON has their length in bytes instead; they stand between it and the tokens."""
UNTRAINED: Final = rows.CALLS.fields.index("untrained") - 1
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Stored:
    """The parts of a stored call. `columns` are those of `rows.CALLS` without the first."""

    key: CallKey
    digest: bytes
    parent: CallKey | None
    columns: tuple[Any, ...]
    blob: bytes


def pack(transition: Transition, parent: CallKey | None, digest: bytes, blob: bytes) -> bytes:
    """Return the value to store for a call. Raises `DataError` for data that a database cannot hold."""
    what = f"of transition {transition.key}"
    if transition.seq < 0:
        raise DataError(f"the seq {what} is negative: count the calls of an attempt from 0")
    for part in (transition.seq, transition.choice, transition.id, transition.finish_reason):
        encoded(part, f"a part {what}")
    columns = list(rows.CALLS.values(transition, without=("seq",)))
    extras: bytes = columns[EXTRAS] or b""  # type: ignore[assignment]  # what its noun says
    columns[EXTRAS] = len(extras)
    text = rows.dump(
        [
            parent[2] if parent is not None and parent[:2] == transition.key[:2] else parent,
            *columns,
        ]
    ).encode()
    return b"".join((digest, _LENGTH.pack(len(text)), text, extras, blob))


def unpack(rollout: str, attempt: int, seq: bytes | int, value: bytes) -> Stored:
    """Divide a stored value into its parts. Raises `StoreError` when it is damaged."""
    try:
        start = DIGEST_BYTES + _LENGTH.size
        (length,) = _LENGTH.unpack_from(value, DIGEST_BYTES)
        key = (rollout, attempt, int(seq))
        parent, *columns = json.loads(value[start : start + length])
        if len(columns) != len(rows.CALLS.fields) - 1:
            raise ValueError("it has not the columns of a call")
        if isinstance(parent, int):
            above: CallKey | None = (rollout, attempt, parent)
        else:
            above = None if parent is None else (str(parent[0]), int(parent[1]), int(parent[2]))
        blob = start + length + columns[EXTRAS]
        columns[EXTRAS] = value[start + length : blob]
        return Stored(key, value[:DIGEST_BYTES], above, tuple(columns), value[blob:])
    except (ValueError, TypeError, LookupError, struct.error) as error:
        raise StoreError(f"its value makes no sense ({error})") from error


def labelled(stored: Stored) -> tuple[str, str]:
    """Return what a label may replace, as the call was appended: its caller, as text, and why it is not trained."""
    return str(stored.columns[1]), str(stored.columns[UNTRAINED])


class Decoder:
    """Decodes calls, each once and after its ancestors. `stored` has all calls that may be an ancestor."""

    def __init__(self, stored: Mapping[CallKey, Stored]) -> None:
        self._stored = stored
        self._known: dict[CallKey, codec.Decoded] = {}

    def known(self, key: CallKey) -> KnownTransition[CallKey]:
        """Return what the cache of parents needs of a call. Raises `StoreError` when the call or an ancestor is damaged."""
        self._resolve(key)
        tokens = self._known[key].tokens
        fingerprint = Fingerprint.of(codec.full_tokens(tokens), len(tokens.prompt_ids) * codec.ITEM)
        return KnownTransition(key, self._stored[key].digest, fingerprint)

    def transition(self, key: CallKey) -> Transition:
        """Return the call as it was appended. Raises `StoreError` when it or an ancestor is damaged or was edited."""
        found = self._stored[key]
        if found.parent is not None:
            self._resolve(found.parent, (key,))
        tokens = self._decode(found)
        rollout, attempt, seq = key
        row = (seq, *found.columns)
        if rollout_state.row_digest(rollout, attempt, row, codec.stored_digest(found.blob)) != found.digest:
            raise StoreError("it does not match the digest that was written with it")
        return rows.CALLS.read(
            row,
            rollout=rollout,
            attempt=attempt,
            prompt_ids=tokens.prompt_ids,
            response_ids=tokens.response_ids,
            logprobs=tokens.logprobs,
        )

    def _resolve(self, key: CallKey, below: Iterable[CallKey] = ()) -> None:
        """Decode the chain of ancestors, oldest first, without recursion, since chains may be long."""
        chain: list[Stored] = []
        met = set(below)
        at: CallKey | None = key
        while at is not None and at not in self._known:
            found = self._stored.get(at)
            if found is None:
                raise StoreError(f"transition {at}, an ancestor of it, is missing")
            if at in met:
                raise StoreError(f"transition {at} is an ancestor of itself")
            met.add(at)
            chain.append(found)
            at = found.parent
        for found in reversed(chain):
            self._decode(found)

    def _decode(self, found: Stored) -> codec.CallTokens:
        parent = codec.NO_PARENT if found.parent is None else self._known[found.parent]
        self._known[found.key] = codec.decode(found.blob, parent)
        return self._known[found.key].tokens

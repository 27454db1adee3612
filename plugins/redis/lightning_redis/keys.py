"""The keys of the store in Redis.

The invariant: every key begins with the store's prefix, and no two things share a key, because free text comes last in it.

    meta                                hash   program, schema version, the id of this database
    runs                                hash by id
    counter                             the number of the rollout created last
    columns, standing                   hashes by rollout: its fixed data; its state
    attempts, labels                    hashes by rollout:attempt: how it ended, and the names given to its calls
    held                                sorted set of worker NUL rollout: the rollouts that a worker holds
    all, pending, running, succeeded, failed, cancelled, step:N, followed by a run
                                        sorted sets of its rollouts by number
    leases:RUN                          sorted set of its running rollouts by the end of their lease
    calls:ATTEMPT:ROLLOUT               hash by seq: the calls of an attempt
    roots:[RUN,GROUP]                   list of calls that siblings may be stored against
    spans:ATTEMPT:ROLLOUT               hash by span id
    steps:RUN, proofs:RUN, metrics:RUN, state:RUN
                                        hashes; proofs are the digests of steps
    uses                                hash of the results of rollouts under each set of resource versions
    changes:RUN                         stream of one entry, the last change, for watches
    once:CALL                           string, for an hour or as long as its leases last: the answer of a call with a name of
                                        its caller
    answers:CLIENT                      hash, for an hour after it was used: the number of the client's connection, that of the
                                        last batch, what each call of the batch was answered
    tokens, revoked                     hashes by id, of the operations that the server brings
    resources, resources:...            what the operations on resources keep
    GROUP, GROUP:...                    what another plugin keeps for its operations
"""

from __future__ import annotations

from lightning.errors import DataError


def encoded(value: str | float | bytes, what: str = "this value") -> bytes:
    """Return a value as bytes for Redis. Raises `DataError` for text that is no Unicode and for integers beyond 64 bits."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the redis store cannot hold {what}: {error}") from error
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise DataError(f"the redis store cannot hold {what}: {value} is beyond 64 bits")
        return b"%d" % value
    return repr(value).encode()


class Keys:
    """Makes the keys. `keys("standing")` is a single table, `keys("calls", 1, "rollout")` one of many."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._tables: dict[str, bytes] = {}

    def __call__(self, name: str, *parts: str | int) -> bytes:
        """Return a key. Raises `DataError` for a part that is no Unicode text."""
        if not parts:
            return self._tables.get(name) or self._tables.setdefault(name, encoded(f"{self._prefix}:{name}"))
        return encoded(":".join((self._prefix, name, *map(str, parts))), "an id")

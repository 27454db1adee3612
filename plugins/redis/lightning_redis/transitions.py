"""Appending model calls and reading them back.

The invariant: the running attempt stores a call once. Sending it again has no effect if it is the same, and is an error
otherwise.

Labels, the names that an agent gave its calls afterwards, are stored with the attempt and put on calls when they are read: the
stored call and its digest stay unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Final

from lightning.errors import StoreError, UnavailableError
from lightning.store import codec, rollout_state, rows
from lightning.store.codec import LOADED_CALLS, Fingerprint, KnownTransition, Prompt, choose
from lightning.types import Transition
from lightning_db.parents_view import ParentsView

from lightning_redis import calls, lua_scripts
from lightning_redis.calls import CallKey, Decoder, Stored
from lightning_redis.connection import Command
from lightning_redis.keys import encoded
from lightning_redis.loop_client import Link, refused
from lightning_redis.rollout_codec import Home, stand

GROUP_ROOTS: Final = 32
"""How many roots of a group are kept as possible parents."""
ATTEMPTS_AT_ONCE: Final = 32
"""Attempts that are read at once; their calls are in memory twice for a moment."""

Attempt = tuple[str, int]
Group = tuple[str, str]


@dataclass(slots=True)
class _Batch:
    """One `append` in progress: the possible parents, including calls of the batch itself, and the script's input. The script
    checks, in the moment that it writes a child, that its parent is still there with the same digest. So no child is ever
    without its parent."""

    link: Link
    parents: ParentsView[CallKey]
    places: dict[bytes, int] = field(default_factory=dict)
    arguments: list[str | int | bytes] = field(default_factory=list)

    def place(self, key: bytes) -> int:
        """Return the position of a key among the script's keys, from 1 on."""
        return self.places.setdefault(key, len(self.places) + 1)

    def add(self, transition: Transition, group: Group, trunk: CallKey | None, digest: bytes | None) -> None:
        """Encode a call against its parent. `trunk` is the call that its rollout branches, if that is in its group. `digest` is
        given when it is not the digest of the call as it is."""
        rollout, number, seq = transition.key
        attempt = (rollout, number)
        packed = codec.pack_tokens(
            codec.CallTokens(transition.prompt_ids, transition.response_ids, transition.logprobs)
        )
        fingerprint = Fingerprint.of(packed.full, len(packed.prompt))
        own, roots, branched = map(self.parents.at_hand, (attempt, group, trunk))
        parent, shared = choose(Prompt(packed.prompt, fingerprint), chain(reversed(own), roots, branched))
        blob = codec.encode(packed, shared)
        digest = digest or rollout_state.record_digest(transition, packed.digest)
        value = calls.pack(transition, parent.key if parent else None, digest, blob)
        keys = self.link.keys
        above: tuple[int, int, bytes] = (0, 0, b"")
        if parent is not None:
            above = (self.place(keys("calls", parent.key[1], parent.key[0])), parent.key[2], parent.head)
        root: tuple[int, str] = (0, "")
        if parent is None:
            root = (self.place(keys("roots", rows.dump(list(group)))), rows.dump([rollout, number, seq]))
        place = self.place(keys("calls", number, rollout))
        self.arguments += [rollout, number, seq, place, digest, value, *above, *root]
        known = KnownTransition(transition.key, digest, fingerprint)
        whole = parent if parent is not None and parent.tokens.length == shared * codec.ITEM else None
        self.parents.add(attempt, known, whole)
        if parent is None:
            self.parents.add(group, known)


async def append(link: Link, transitions: Sequence[Transition]) -> int:
    """Store calls, and return how many are new. Raises `ConflictError` for other content under a stored key,
    `StaleAttemptError` for an attempt that is not running."""
    transitions = rollout_state.settled(transitions)  # copied, because the caller may change its list while this waits
    if not transitions:
        return 0
    homes = [await link.home(transition.rollout) for transition in transitions]
    groups = [(home.run, home.group) for home in homes]
    trunks = [await _trunk(link, home) for home in homes]
    digests: dict[int, bytes] = {}
    lost_parents = 0
    while True:
        parents = ParentsView(link.parents)
        if lost_parents <= 1:
            await _look_for_parents(link, parents, transitions, groups, trunks)
        batch = _Batch(link, parents)
        for i, (transition, group, trunk) in enumerate(zip(transitions, groups, trunks, strict=True)):
            batch.add(transition, group, trunk, digests.get(i))
        head = (calls.DIGEST_BYTES, GROUP_ROOTS, len(transitions))
        word, *rest = await link.run(
            lua_scripts.of_store("append"), (link.keys("standing"), *batch.places), *head, *batch.arguments
        )
        if word == "ok":
            parents.keep()
            return int(rest[0])
        at = int(rest[0])
        transition = transitions[at]
        if word == "orphan" and lost_parents <= 1:  # the cache is out of date: read again, then store without parents
            for place in (*((each.rollout, each.attempt) for each in transitions), *groups, *trunks):
                link.parents.drop(place)
            lost_parents += 1
        elif word == "conflict" and at not in digests:
            digests[at] = await _digest_in_place(link, transition, rest[1])
        elif word == "conflict":
            raise rollout_state.stored_otherwise(transition)
        else:
            raise refused(word, rest[1:], transition.rollout, transition.attempt)


async def _trunk(link: Link, home: Home) -> CallKey | None:
    """Return the call that a rollout branches, if both are in one group, because a group's calls are deleted together; else
    None."""
    if home.parent is None:
        return None
    try:
        parent = await link.home(home.parent[0])
    except UnavailableError:
        raise
    except StoreError:  # it was removed, or is damaged: reading it raises the error
        return None
    return home.parent if (parent.run, parent.group) == (home.run, home.group) else None


async def _digest_in_place(link: Link, transition: Transition, value: bytes) -> bytes:
    """Return the digest of a stored call if it is this call and was labelled since; or its new digest if it was answered and
    the answer did not arrive. Raises `ConflictError` for another call."""
    tokens = codec.CallTokens(transition.prompt_ids, transition.response_ids, transition.logprobs)
    content = codec.pack_tokens(tokens).digest
    attempt = (transition.rollout, transition.attempt)
    stored = calls.unpack(*attempt, transition.seq, value)
    labels = (await _labels(link, [attempt]))[0]
    transition = labels.get(transition.id, rows.NO_LABEL).taken_off(transition, *calls.labelled(stored))
    digest = rollout_state.record_digest(transition, content)
    if digest == stored.digest:
        return digest
    for answered in rollout_state.answered(transition):
        if rollout_state.record_digest(answered, content) == stored.digest:
            return await _mark_aborted(link, transition, stored, digest)
    raise rollout_state.stored_otherwise(transition)


async def _mark_aborted(link: Link, transition: Transition, stored: Stored, digest: bytes) -> bytes:
    rollout, attempt, seq = transition.key
    keys = (link.keys("standing"), link.keys("calls", attempt, rollout))
    changed = calls.pack(transition, stored.parent, digest, stored.blob)
    head = (rollout, attempt, seq, calls.DIGEST_BYTES, stored.digest, changed)
    word, *rest = await link.run(lua_scripts.of_store("mark_aborted"), keys, *head)
    if word not in ("ok", "changed"):  # changed: by another who says the same; who appends looks again
        raise refused(word, rest, rollout, attempt)
    link.parents.drop((rollout, attempt))
    return digest


async def _look_for_parents(
    link: Link,
    parents: ParentsView[CallKey],
    transitions: Sequence[Transition],
    groups: Sequence[Group],
    trunks: Sequence[CallKey | None],
) -> None:
    """Load the possible parents: calls of the attempts and of the calls they branch, and the roots of their groups."""
    for transition, group, trunk in zip(transitions, groups, trunks, strict=True):
        attempt = (transition.rollout, transition.attempt)
        # the first call of an attempt has no earlier ones to load
        await parents.get(attempt, partial(_load_attempt, link, attempt) if transition.seq else _nothing)
        await parents.get(group, partial(_load_roots, link, group))
        if trunk:
            await parents.get(trunk, partial(_load_trunk, link, trunk))


async def _nothing() -> list[KnownTransition[CallKey]]:
    return []


async def _load_attempt(link: Link, attempt: Attempt) -> list[KnownTransition[CallKey]]:
    (found,) = await _read_calls(link, [attempt])
    return await _known(link, found, sorted(found))


async def _load_trunk(link: Link, trunk: CallKey) -> list[KnownTransition[CallKey]]:
    (found,) = await _read_calls(link, [trunk[:2]])
    return await _known(link, found, sorted(key for key in found if key <= trunk)[-LOADED_CALLS:])


async def _load_roots(link: Link, group: Group) -> list[KnownTransition[CallKey]]:
    (names,) = await link.reads.read((b"LRANGE", link.keys("roots", rows.dump(list(group))), b"0", b"-1"))
    keys = [(str(rollout), int(attempt), int(seq)) for rollout, attempt, seq in map(json.loads, names)]
    found = await _read_single(link, keys)
    return await _known(link, found, list(found))


async def _known(
    link: Link, found: Mapping[CallKey, Stored | StoreError], keys: Sequence[CallKey]
) -> list[KnownTransition[CallKey]]:
    decoder = Decoder(await _with_ancestors(link, found))
    known = []
    for key in keys:
        try:
            known += [decoder.known(key)] if isinstance(found[key], Stored) else []
        except (StoreError, ValueError, TypeError):  # a damaged call is no parent; reading it raises the error
            continue
    return known


async def read(link: Link, rollout: str, attempt: int | None) -> list[Transition]:
    """Return the calls of an attempt (None: the current one) in `seq` order."""
    if attempt is None:
        attempt = await current_attempt(link, rollout)
    return (await read_many(link, [(rollout, attempt)]))[0]


async def current_attempt(link: Link, rollout: str) -> int:
    """Return a rollout's current attempt. Raises `StoreError` for an unknown rollout."""
    (standing,) = await link.reads.read((b"HGET", link.keys("standing"), encoded(rollout)))
    if standing is None:
        raise rollout_state.unknown_rollout(rollout)
    return int(stand(standing, rollout)["attempt"])


async def read_many(link: Link, attempts: Sequence[Attempt]) -> list[list[Transition]]:
    """Return the calls of several attempts, in the order asked."""
    read: list[list[Transition]] = []
    for at in range(0, len(attempts), ATTEMPTS_AT_ONCE):
        asked = attempts[at : at + ATTEMPTS_AT_ONCE]
        found = await _read_calls(link, asked)
        labels = await _labels(link, asked)
        every = {key: stored for each in found for key, stored in each.items()}
        decoder = Decoder(await _with_ancestors(link, every))
        for (rollout, _), mine, names in zip(asked, found, labels, strict=True):
            if not mine:
                await link.home(rollout)  # raises for a rollout nobody created
            read.append([_decode(decoder, key, stored, names) for key, stored in sorted(mine.items())])
    return read


def _decode(
    decoder: Decoder, key: CallKey, stored: Stored | StoreError, labels: Mapping[str, rows.Label]
) -> Transition:
    try:
        if isinstance(stored, StoreError):
            raise stored
        transition = decoder.transition(key)
    except (StoreError, ValueError, TypeError) as error:
        raise StoreError(
            f"transition {key} is corrupt: {error}. The database was damaged or edited: restore it from a backup"
        ) from error
    return labels[transition.id].put_on(transition) if transition.id in labels else transition


async def _labels(link: Link, attempts: Sequence[Attempt]) -> list[dict[str, rows.Label]]:
    """Return the labels that each attempt was completed with, by call."""
    fields = [encoded(f"{rollout}:{attempt}") for rollout, attempt in attempts]
    (texts,) = await link.reads.read((b"HMGET", link.keys("labels"), *fields))
    return [{} if text is None else rows.labels_from_text(text.decode()) for text in texts]


async def _read_calls(link: Link, attempts: Sequence[Attempt]) -> list[dict[CallKey, Stored | StoreError]]:
    """Return all calls of each attempt by key, or the error of a damaged call."""
    commands = [(b"HGETALL", link.keys("calls", attempt, rollout)) for rollout, attempt in attempts]
    found = []
    for (rollout, attempt), flat in zip(attempts, await link.reads.read(*commands), strict=True):
        mine: dict[CallKey, Stored | StoreError] = {}
        for seq, value in zip(flat[::2], flat[1::2], strict=True):
            mine[rollout, attempt, int(seq)] = _unpack((rollout, attempt, int(seq)), value)
        found.append(mine)
    return found


async def _read_single(link: Link, keys: Sequence[CallKey]) -> dict[CallKey, Stored | StoreError]:
    if not keys:
        return {}
    commands: list[Command] = [
        (b"HGET", link.keys("calls", attempt, rollout), encoded(seq)) for rollout, attempt, seq in keys
    ]
    values = await link.reads.read(*commands)
    return {key: _unpack(key, value) for key, value in zip(keys, values, strict=True) if value is not None}


def _unpack(key: CallKey, value: bytes) -> Stored | StoreError:
    try:
        return calls.unpack(*key, value)
    except StoreError as error:
        return error


async def _with_ancestors(link: Link, found: Mapping[CallKey, Stored | StoreError]) -> dict[CallKey, Stored]:
    """Return the undamaged calls, with those of other attempts that they are encoded against."""
    every = {key: stored for key, stored in found.items() if isinstance(stored, Stored)}
    looked: set[CallKey] = set()
    while True:
        wanted = {stored.parent for stored in every.values() if stored.parent is not None} - every.keys() - looked
        if not wanted:
            return every
        looked |= wanted
        more = await _read_single(link, sorted(wanted))
        every |= {key: stored for key, stored in more.items() if isinstance(stored, Stored)}


async def next_seq(link: Link, rollout: str, attempt: int) -> int:
    """Return the number for the next call of an attempt."""
    (fields,) = await link.reads.read((b"HKEYS", link.keys("calls", attempt, rollout)))
    return max((int(seq) + 1 for seq in fields), default=0)

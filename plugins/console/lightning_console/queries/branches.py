"""Branches: rollouts that begin as another one did, up to one of its calls, and have calls of their own from there on.

The invariant: a branch stands where it leaves its parent's line, and what its parent was answered is never counted as its own.
Branches of one run are those that training made in its groups; `lightning branch` makes a run of its own in the same store.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from lightning.batch import is_prefix
from lightning.config import recorded_config
from lightning.errors import ConfigError, DataError, LightningError, StoreError, UnavailableError
from lightning.store.pages import each_rollout
from lightning.store.protocol import Attempt, Store
from lightning.trainer.epochs import is_over
from lightning.trainer.plan import TRAIN
from lightning.trainer.stack import why_not_served
from lightning.types import BRANCH_VOID, Json, Rollout, Run, Transition
from lightning_branching.recorded import CHANGES, live_tools, prefix_of, recorded_rollout, version_of
from lightning_record.exchanges import packed_in

from lightning_console.places import Located, key_of
from lightning_console.queries.conversation import one_line

LOOKED: Final = 500
"""Runs of a store, the newest, among which those that have branches of another run are looked for."""
MOST: Final = 512
"""Branches that are told."""
LONGEST_CHANGE: Final = 60
"""Characters of what was changed."""
WORDS: Final = ("rollout", "attempt", "at", "edit", "prompts", "components", "weights", "live")
"""What the configuration of a run says of its branches."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch. `key` names its run in addresses, `changed` says what is another than in its parent, empty where it is a sample
    of the same policy; `edit` is the text that stands for the parent's answer, None where that call is sampled."""

    rollout: Rollout
    key: str
    changed: str = ""
    edit: str | None = None


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a branch has of its parent's `calls`: the places of those that were answered before the call at place `at` was sent,
    which is None where that call is not there; of these, the first `shared` are the line that both have."""

    answered: tuple[int, ...]
    at: int | None
    shared: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Whether branches can begin at a call: at the call `at`, as `lightning branch --at` counts, else 0, and `why` not. `tools`
    are those that run again. `live` says that the run's trainer serves the version that answered the call, now."""

    at: int = 0
    why: str = ""
    tools: tuple[str, ...] = ()
    live: bool = False


NOWHERE: Final = Fork()
"""Of a rollout without calls."""


@dataclass(frozen=True, slots=True)
class _Changes:
    """What the branches of a run change: in words, empty where nothing is, and the text of an edited answer."""

    parent: str
    changed: str
    edit: str | None


_known: WeakKeyDictionary[Store, dict[tuple[str, float], _Changes | None]] = WeakKeyDictionary()


def inherited(calls: Sequence[Transition], seq: int) -> Inherited:
    """What a branch at the call `seq` has of its parent's calls, as the gateway decides it."""
    at = next((place for place, call in enumerate(calls) if call.seq == seq), None)
    if at is None:
        return Inherited((), None, 0)
    before = [call.status.answered and is_prefix(call, calls[at]) for call in calls]
    answered = tuple(place for place, known in enumerate(before) if known)
    return Inherited(answered, at, next((place for place, known in enumerate(before) if not known), at))


def own_calls(calls: Sequence[Transition]) -> list[Transition]:
    """The calls of an attempt without those that were refused because it is no branch of its parent."""
    return [call for call in calls if call.finish_reason != BRANCH_VOID]


def is_sample(branch: Branch) -> bool:
    """Whether what a branch earned says how well its parent's policy goes on from there."""
    return not branch.changed and branch.rollout.reward is not None


async def changes_of(store: Store, run: Run) -> tuple[str, str | None]:
    """What the branches of a run change, in words, and the answer that was edited, if one was."""
    found = await _changes(store, run)
    return (found.changed, found.edit) if found else ("", None)


async def _changes(store: Store, run: Run) -> _Changes | None:
    """Read once; None for a run that has no branches of another one. `run` may be brief."""
    cache = _known.setdefault(store, {})
    about = (run.id, run.created_at)
    if about not in cache:
        try:
            whole = run if run.config else await store.get_run(run.id)
            cache[about] = await _read(store, whole.config if whole is not None else {})
        except UnavailableError:
            raise
        except LightningError:  # it cannot be read, which its own page says, and must not hide another run's
            cache[about] = None
    return cache[about]


async def _read(store: Store, config: Mapping[str, Json]) -> _Changes | None:
    said = config.get(CHANGES)
    if not isinstance(said, Mapping):
        return None
    parent = await store.get_rollout(str(said.get("rollout", "")))
    run = await store.get_run(parent.run) if parent is not None else None
    edit, weights, components = said.get("edit"), said.get("weights"), said.get("components")
    parts = [] if edit is None else [f"edit: {one_line(str(edit), LONGEST_CHANGE)}"]
    if said.get("prompts"):
        parts.append("other prompts" + (f": {one_line(components, LONGEST_CHANGE)}" if components else ""))
    if weights and (parent is None or weights != await _weights_of(store, parent, said)):
        parts.append(f"weights: {one_line(weights, LONGEST_CHANGE)}")
    sampling = _sampling(config)
    before = _sampling(run.config, held_out=parent.split != TRAIN) if run is not None and parent is not None else {}
    parts += [f"{name} {value}" for name, value in sampling.items() if before.get(name) != value]
    parts += [f"{name}: {one_line(value, LONGEST_CHANGE)}" for name, value in said.items() if name not in WORDS]
    return _Changes(str(said.get("rollout", "")), ", ".join(parts), None if edit is None else str(edit))


async def _weights_of(store: Store, parent: Rollout, said: Mapping[str, Json]) -> str:
    """The weights that answered the parent's call, as a run names them."""
    attempt, at = said.get("attempt", parent.attempt), said.get("at")
    if not isinstance(attempt, int) or not isinstance(at, int):
        return ""
    calls = [each for each in await store.transitions(parent.id, attempt) if not each.choice and packed_in(each)]
    if not 0 < at <= len(calls):
        return ""
    return f"{parent.run}@{version_of(calls[at - 1], parent)}"


def _sampling(config: Mapping[str, Json], *, held_out: bool = False) -> dict[str, Json]:
    """The sampling parameters that a run gives to its calls, whatever they ask for."""
    settings = config.get("config")
    sections = settings if isinstance(settings, Mapping) else {}
    gateway, trainer = sections.get("gateway"), sections.get("trainer")
    own = gateway.get("override_sampling") if isinstance(gateway, Mapping) else None
    found = dict(own) if isinstance(own, Mapping) else {}
    temperature = trainer.get("eval_temperature") if isinstance(trainer, Mapping) else None
    return found | ({"temperature": temperature} if held_out and temperature is not None else {})


async def _runs(located: Located, patience: float | None) -> tuple[list[tuple[str, _Changes]], bool]:
    """The younger runs in a run's store and project that have branches, the newest first, and whether some are not read yet.
    Each configuration is read once, those of one look for `patience` seconds."""
    found: list[tuple[str, _Changes]] = []
    until = math.inf if patience is None else time.monotonic() + patience
    known = _known.setdefault(located.store, {})
    for brief in await located.store.list_runs(located.run.project, limit=LOOKED, brief=True):
        if brief.created_at < located.run.created_at:
            break  # a branch is younger than its parent
        if (brief.id, brief.created_at) not in known and time.monotonic() >= until:
            return found, True
        if (changes := await _changes(located.store, brief)) is not None:
            found.append((brief.id, changes))
    return found, False


async def branches_of(
    located: Located, parents: Sequence[str], *, patience: float | None = None
) -> tuple[list[Branch], bool]:
    """The branches that runs of their own have of these rollouts, and whether there may be more of them, or other ones. Runs
    that take longer than `patience` seconds to read are left for the next time."""
    wanted, store = set(parents), located.store
    found: list[Branch] = []
    runs, live = await _runs(located, patience)
    for run, changes in runs:
        if changes.parent not in wanted:
            continue
        own = [each async for each in each_rollout(store, run) if each.parent and each.parent[0] in wanted]
        found += [Branch(each, key_beside(located, run), changes.changed, changes.edit) for each in own]
        live = live or (not all(each.status.ended for each in own) and not await is_over(store, run))
        if len(found) >= MOST:
            break
    return found[:MOST], live


async def runs_with_branches(located: Located) -> list[str]:
    """The keys of the runs that have branches of this run's rollouts."""
    keys = []
    for run, changes in (await _runs(located, None))[0]:
        parent = await located.store.get_rollout(changes.parent)
        if parent is not None and parent.run == located.run.id:
            keys.append(key_beside(located, run))
    return keys


async def parent_of(located: Located) -> tuple[str, str] | None:
    """The rollout whose branches a run has, after the key of its run; None for a run of another kind."""
    changes = await _changes(located.store, located.run)
    parent = await located.store.get_rollout(changes.parent) if changes is not None else None
    return (key_beside(located, parent.run), parent.id) if parent is not None else None


def key_beside(located: Located, run: str) -> str:
    """The key of another run in the same store."""
    return located.key if run == located.run.id else key_of(run, located.url if "~" in located.key else "")


async def fork_of(located: Located, rollout: Rollout, calls: Sequence[Transition], ended: Attempt, place: int) -> Fork:
    """Whether branches of a rollout can begin at the call at `place` of the `calls` of an attempt that has `ended`."""
    if rollout.parent is not None:
        return Fork(why=f"it is itself a branch of {rollout.parent[0]}: branch that one")
    first = next((call for call in reversed(calls[: place + 1]) if not call.choice), calls[place])
    if not first.status.answered:
        return Fork(why="this call got no answer")
    try:
        recorded = recorded_rollout(rollout, calls, ended.tool_events, ended.step_rewards)
        prefix = prefix_of(recorded, first.seq)
    except (DataError, StoreError) as error:
        return Fork(why=str(error))
    tools = tuple(live_tools(recorded, prefix))
    return Fork(prefix.at.number, tools=tools, live=await _is_live(located, version_of(first, rollout)))


async def _is_live(located: Located, version: int) -> bool:
    """Whether the policy that the run's trainer serves could answer branches at a call that this version answered."""
    settings = located.run.config.get("config")
    if "://" not in located.url or located.url.startswith(("http://", "https://")) or not isinstance(settings, Mapping):
        return False  # a server answers its clients alone
    try:
        config, _ = recorded_config(settings)
    except ConfigError:  # they are another release's, which the command says
        return False
    return not await why_not_served(located.store, located.run.id, version, config)

"""Find branches: rollouts that repeat their parent's calls up to one of them, and make their own calls from there on.

The invariant: a branch is shown at the call where it leaves its parent, and its parent's answers never count as its own.
Branches in the same run were made by training: in the group of their parent, or as a group of a later step that begins behind
it. `lightning branch` makes a new run for them in the same store.
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
from lightning.trainer.context import is_over
from lightning.trainer.plan import TRAIN
from lightning.types import BRANCH_VOID, Json, Rollout, Run, Transition
from lightning_branching.live_policy import why_not_served
from lightning_branching.recorded import CHANGES, live_tools, prefix_of, recorded_rollout, version_of
from lightning_debug.credit_audit import KEPT, CreditAudit, kept_audit
from lightning_record.exchanges import packed_in

from lightning_console.places import Located, key_of
from lightning_console.queries.behind import LOOKED, begun_behind, borrowers_of, samples_prefixes
from lightning_console.queries.conversation import one_line

MOST: Final = 512
"""Most branches that are returned."""
LONGEST_CHANGE: Final = 60
"""Most characters of one change."""
WORDS: Final = ("rollout", "attempt", "at", "edit", "prompts", "components", "weights", "live", "audit", "rollouts")
"""The known keys in a run's configuration about its branches; any other key is shown as a change."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch. `key` names its run in addresses. `changed` says how it differs from its parent, empty if it is another sample
    of the same policy. `edit` is the text that replaces the parent's answer, None if that call is sampled."""

    rollout: Rollout
    key: str
    changed: str = ""
    edit: str | None = None


@dataclass(frozen=True, slots=True)
class Inherited:
    """The calls that a branch takes over from its parent, as indices: `at` is the call at which it branches (None if that is
    not stored), `answered` are the calls that were answered before it was sent. The first `shared` calls of the parent are all
    among these: the line that both have in common."""

    answered: tuple[int, ...]
    at: int | None
    shared: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Whether branches can begin at a call. `at` is its number for `lightning branch --at`; 0 if none can begin, and `why` says
    why. `tools` are the tools that run again. `live` says that the run's trainer now serves the version that answered it."""

    at: int = 0
    why: str = ""
    tools: tuple[str, ...] = ()
    live: bool = False


NOWHERE: Final = Fork()
"""The `Fork` of a rollout without calls."""


@dataclass(frozen=True, slots=True)
class _Changes:
    """The change that the branches of a run make to the rollout `parent`: in words, empty for none, and the text of an edited
    answer (None if none was edited). `audits` is the run whose credit the branches audit; they are of many rollouts."""

    parent: str
    changed: str
    edit: str | None
    audits: str = ""


_known: WeakKeyDictionary[Store, dict[tuple[str, float], _Changes | None]] = WeakKeyDictionary()


def inherited(calls: Sequence[Transition], seq: int) -> Inherited:
    """Return the calls that a branch at the call `seq` takes over from its parent's `calls`, by the gateway's rule."""
    at = next((place for place, call in enumerate(calls) if call.seq == seq), None)
    if at is None:
        return Inherited((), None, 0)
    before = [call.status.answered and is_prefix(call, calls[at]) for call in calls]
    answered = tuple(place for place, known in enumerate(before) if known)
    return Inherited(answered, at, next((place for place, known in enumerate(before) if not known), at))


def own_calls(calls: Sequence[Transition]) -> list[Transition]:
    """Return the calls of an attempt without those that were refused because the branch was void."""
    return [call for call in calls if call.finish_reason != BRANCH_VOID]


def is_sample(branch: Branch) -> bool:
    """Return whether a branch's reward is a sample of its parent's policy: it changed nothing and has a reward."""
    return not branch.changed and branch.rollout.reward is not None


async def changes_of(store: Store, run: Run) -> tuple[str, str | None]:
    """Return the change that the branches of a run make, in words, and the edited answer (None if none was edited)."""
    found = await _changes(store, run)
    return (found.changed, found.edit) if found else ("", None)


async def _changes(store: Store, run: Run) -> _Changes | None:
    """Return the change that the branches of a run make, read once and kept; None for a run without branches of another run.
    `run` may lack its configuration."""
    cache = _known.setdefault(store, {})
    about = (run.id, run.created_at)
    if about not in cache:
        try:
            whole = run if run.config else await store.get_run(run.id)
            cache[about] = await _read(store, whole.config if whole is not None else {})
        except UnavailableError:
            raise
        except LightningError:  # its own page says so; it must not hide branches of other runs
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
    audits = str(said.get("audit", "")).rpartition("@")[0]
    return _Changes(str(said.get("rollout", "")), ", ".join(parts), None if edit is None else str(edit), audits)


async def _weights_of(store: Store, parent: Rollout, said: Mapping[str, Json]) -> str:
    """Return the weights that answered the parent's call as `RUN@VERSION`; empty if that call is not stored."""
    attempt, at = said.get("attempt", parent.attempt), said.get("at")
    if not isinstance(attempt, int) or not isinstance(at, int):
        return ""
    calls = [each for each in await store.transitions(parent.id, attempt) if not each.choice and packed_in(each)]
    if not 0 < at <= len(calls):
        return ""
    return f"{parent.run}@{version_of(calls[at - 1], parent)}"


def _sampling(config: Mapping[str, Json], *, held_out: bool = False) -> dict[str, Json]:
    """Return the sampling parameters that a run's settings force on its calls."""
    settings = config.get("config")
    sections = settings if isinstance(settings, Mapping) else {}
    gateway, trainer = sections.get("gateway"), sections.get("trainer")
    own = gateway.get("override_sampling") if isinstance(gateway, Mapping) else None
    found = dict(own) if isinstance(own, Mapping) else {}
    temperature = trainer.get("eval_temperature") if isinstance(trainer, Mapping) else None
    return found | ({"temperature": temperature} if held_out and temperature is not None else {})


async def _runs(located: Located, patience: float | None) -> tuple[list[tuple[Run, _Changes]], bool]:
    """Return the newer runs with branches in a run's store and project, the newest first, and whether some are still unread:
    one call reads configurations for at most `patience` seconds, each only once."""
    found: list[tuple[Run, _Changes]] = []
    until = math.inf if patience is None else time.monotonic() + patience
    known = _known.setdefault(located.store, {})
    for brief in await located.store.list_runs(located.run.project, limit=LOOKED, brief=True):
        if brief.created_at < located.run.created_at:
            break  # a branch is younger than its parent
        if (brief.id, brief.created_at) not in known and time.monotonic() >= until:
            return found, True
        if (changes := await _changes(located.store, brief)) is not None:
            found.append((brief, changes))
    return found, False


async def branches_of(
    located: Located, parents: Sequence[str], *, patience: float | None = None
) -> tuple[list[Branch], bool]:
    """Return the branches of these rollouts that are in other runs or in groups of later steps, but for those of credit audits,
    and whether the result may still change. Runs that were not read within `patience` seconds (None: no limit) are left for the
    next call."""
    wanted, store = set(parents), located.store
    runs, live = await _runs(located, patience)
    training, unread = await borrowers_of(store, located.run, patience)
    live = live or unread
    if await samples_prefixes(store, located.run):
        training.insert(0, located.run)
    found: list[Branch] = []
    for run in training:
        behind, grows = await begun_behind(store, run, parents, MOST, patience)
        key, live = key_beside(located, run.id), live or grows
        found += [Branch(each, key, f"weights: {run.id}@{max(0, each.step - 1)}") for each in behind]
    for run, changes in runs:
        if len(found) >= MOST:
            break
        if changes.parent not in wanted or changes.audits:
            continue
        own = [each async for each in each_rollout(store, run.id) if each.parent and each.parent[0] in wanted]
        found += [Branch(each, key_beside(located, run.id), changes.changed, changes.edit) for each in own]
        live = live or (not all(each.status.ended for each in own) and not await is_over(store, run.id))
    return found[:MOST], live


async def audits_of(located: Located, *, patience: float | None = None) -> tuple[list[CreditAudit], bool]:
    """Return the credit audits of a run, the newest first, and whether there may be more. Runs that were not read within
    `patience` seconds (None: no limit) are left for the next call."""
    runs, more = await _runs(located, patience)
    names = [run.id for run, changes in runs if changes.audits == located.run.id]
    kept = [kept_audit(await located.store.get_state(name, KEPT)) for name in names]
    return [audit for audit in kept if audit is not None], more


async def runs_with_branches(located: Located) -> list[str]:
    """Return the keys of the other runs that have branches of this run's rollouts, but for credit audits, which have
    hundreds."""
    keys = []
    for run, changes in (await _runs(located, None))[0]:
        parent = await located.store.get_rollout(changes.parent)
        if not changes.audits and parent is not None and parent.run == located.run.id:
            keys.append(key_beside(located, run.id))
    return keys


async def parent_of(located: Located) -> tuple[str, str] | None:
    """Return the parent of a run's branches: the key of its run, and its id, which is empty if the branches audit the credit of
    that run. None for a run that was not made for branches."""
    changes = await _changes(located.store, located.run)
    if changes is not None and changes.audits:
        return key_beside(located, changes.audits), ""
    parent = await located.store.get_rollout(changes.parent) if changes is not None else None
    return (key_beside(located, parent.run), parent.id) if parent is not None else None


def key_beside(located: Located, run: str) -> str:
    """Return the key of a run in the same store as `located`."""
    return located.key if run == located.run.id else key_of(run, located.url if "~" in located.key else "")


async def fork_of(located: Located, rollout: Rollout, calls: Sequence[Transition], ended: Attempt, place: int) -> Fork:
    """Return whether branches of a rollout can begin at the call with index `place` in `calls`, the calls of an attempt whose
    events and rewards are `ended`."""
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
    """Return whether the run's trainer now serves the policy version that answered a call, so that it could answer branches."""
    settings = located.run.config.get("config")
    if "://" not in located.url or located.url.startswith(("http://", "https://")) or not isinstance(settings, Mapping):
        return False  # a server answers its clients alone
    try:
        config, _ = recorded_config(settings)
    except ConfigError:  # settings of another release, which the command reports
        return False
    return not await why_not_served(located.store, located.run.id, version, config)

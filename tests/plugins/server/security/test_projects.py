"""Projects are apart: whatever a method is asked, another project's things answer as things that never were."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.errors import ConflictError, DataError, LightningError, StoreError
from lightning.store import Store
from lightning.store.memory import MemoryStore
from lightning.store.operation import Operations
from lightning.types import (
    Caller,
    Lease,
    Outcome,
    Rollout,
    Run,
    Scope,
    Span,
    StepRecord,
    StepReward,
    Task,
    ToolEvent,
    Transition,
    logprobs,
    token_ids,
)
from lightning_otel.traces.store import append_spans, spans
from lightning_resources.nouns import Resource, ResourceKind
from lightning_resources.operations import (
    alias_history,
    get_resource,
    list_aliases,
    list_resources,
    put_resource,
    resource_uses,
    roll_back_alias,
    set_alias,
)
from lightning_server.auth import issue_token
from lightning_server.projects import Projects, ProjectStore
from lightning_server.tokens import get_token, list_tokens, put_token, revoke_token


@dataclass(frozen=True)
class Ids:
    """What a caller may name. `done` is a rollout that has ended, `live` one that is leased by `worker`."""

    run: str
    done: str
    live: str
    worker: str
    token: str
    resource: str


THEIRS = Ids("theirs", "theirs/done", "theirs/live", "w", "aaaaaaaaaaaaaaaa", "writer")
UNKNOWN = Ids("absent", "absent/done", "absent/live", "v", "bbbbbbbbbbbbbbbb", "absent")
Case = Callable[[Store, Ids], Awaitable[object]]


def call(rollout: str, attempt: int = 1, seq: int = 0) -> Transition:
    return Transition(
        rollout, attempt, seq, f"c{seq}", token_ids([1, 2]), token_ids([3]), logprobs([-0.5]), Caller("agent")
    )


def span(rollout: str) -> Span:
    return Span(rollout, 1, "f" * 32, "e" * 16, name="a span")


def lease_of(ids: Ids) -> Lease:
    return Lease(Rollout(ids.live, ids.run, Task("t"), "g", attempt=1), ids.worker, 0.0)


def record(run: str, rollout: str, step: int = 2) -> StepRecord:
    return StepRecord(run, step, step, ((rollout, 1),), ("d",), "digest")


async def watched(store: Store, ids: Ids) -> bool:
    async with store.watch(ids.run) as watch:
        return await watch.wait(0.0)


CASES: dict[str, Case | None] = {
    "open": None,  # names nothing
    "close": None,
    "put_run": None,  # creates: see test_an_id_that_is_taken_is_refused_and_nothing_is_told
    "create_rollouts": lambda store, ids: store.create_rollouts([Rollout(f"{ids.run}/new", ids.run, Task("x"), "g")]),
    "get_run": lambda store, ids: store.get_run(ids.run),
    "list_runs": lambda store, ids: store.list_runs(ids.run),  # a run's name is its project's here
    "watch": watched,
    "get_rollout": lambda store, ids: store.get_rollout(ids.done),
    "list_rollouts": lambda store, ids: store.list_rollouts(ids.run),
    "lease": lambda store, ids: store.lease(ids.run, "me", limit=5),
    "renew": lambda store, ids: store.renew(lease_of(ids)),
    "complete": lambda store, ids: store.complete(ids.live, 1, Outcome(reward=9.0)),
    "release": lambda store, ids: store.release(ids.worker),
    "append": lambda store, ids: store.append([call(ids.live, seq=7)]),
    "next_seq": lambda store, ids: store.next_seq(ids.live, 1),
    "transitions": lambda store, ids: store.transitions(ids.live),
    "transitions_of": lambda store, ids: store.transitions_of([(ids.live, 1)]),
    "attempts_of": lambda store, ids: store.attempts_of([(ids.done, 1)]),
    "count_rollouts": lambda store, ids: store.count_rollouts(ids.run),
    "last_step": lambda store, ids: store.last_step(ids.run),
    "append_spans": lambda store, ids: append_spans(store, [span(ids.live)]),
    "spans": lambda store, ids: spans(store, ids.live),
    "commit_step": lambda store, ids: store.commit_step(record(ids.run, ids.done)),
    "steps": lambda store, ids: store.steps(ids.run),
    "log_metrics": lambda store, ids: store.log_metrics(ids.run, 0, {"loss": 9.0}),
    "metrics": lambda store, ids: store.metrics(ids.run),
    "put_state": lambda store, ids: store.put_state(ids.run, "notes", 9),
    "keep_state": lambda store, ids: store.keep_state(ids.run, "notes", 9),
    "get_state": lambda store, ids: store.get_state(ids.run, "notes"),
    "call": None,  # what each of the others is
    "put_token": None,  # creates: see test_a_token_makes_tokens_of_its_project_only
    "get_token": lambda store, ids: get_token(store, ids.token),
    "list_tokens": lambda store, ids: list_tokens(store),
    "revoke_token": lambda store, ids: revoke_token(store, ids.token),
    "put_resource": None,  # a name of one's own, whoever else has it: see the property below
    "get_resource": lambda store, ids: get_resource(store, ids.resource),
    "list_resources": lambda store, ids: list_resources(store, ids.resource),
    "set_alias": lambda store, ids: set_alias(store, ids.resource, "live", 1),
    "roll_back_alias": lambda store, ids: roll_back_alias(store, ids.resource, "live"),
    "list_aliases": lambda store, ids: list_aliases(store, ids.resource),
    "alias_history": lambda store, ids: alias_history(store, ids.resource, "live"),
    "resource_uses": lambda store, ids: resource_uses(store, ids.resource),
}
"""How each method of `Store` is asked for somebody else's things."""
SAME_FOR_OWNERS = {"next_seq", "watch"}
"""Methods whose answer says nothing, or which come before what they would show."""


def methods() -> set[str]:
    return {name for name, value in vars(Store).items() if inspect.isfunction(value) and not name.startswith("_")}


def test_every_method_of_the_store_has_a_rule() -> None:
    public = {name for name in methods() if name not in ("open", "close")}
    assert set(CASES) >= methods(), "a method of Store without a case here: say how it keeps projects apart"
    assert public <= set(vars(ProjectStore)) | set(vars(Operations)), (
        "ProjectStore must decide about every method itself"
    )


async def fill(store: Store, project: str, ids: Ids) -> None:
    """Some of everything, in a project."""
    view = ProjectStore(store, project)
    await view.put_run(Run(ids.run, "a run"))
    for version in ("one", "two"):
        await put_resource(view, Resource(ids.resource, version))
    for version in (1, 2):
        await set_alias(view, ids.resource, "live", version)
    rollouts = [Rollout(name, ids.run, Task(name), "g", resources={ids.resource: 1}) for name in (ids.done, ids.live)]
    await view.create_rollouts(rollouts)
    await view.lease(ids.run, ids.worker, limit=2)
    await view.create_rollouts([Rollout(f"{ids.run}/waiting", ids.run, Task("later"), "g")])
    await view.append([call(ids.done), call(ids.live)])
    await append_spans(view, [span(ids.live)])
    await view.complete(
        ids.done, 1, Outcome(reward=1.0, tool_events=(ToolEvent("t", "ok"),), step_rewards=(StepReward(1.0),))
    )
    await view.commit_step(record(ids.run, ids.done, 1))
    await view.log_metrics(ids.run, 0, {"loss": 1.0})
    await view.put_state(ids.run, "notes", 1)
    await put_token(view, replace(issue_token(Scope.RUNNER, project)[0], id=ids.token))


async def outcome(case: Case, store: Store, ids: Ids) -> str:
    """What a call answered, without the names in it and without times."""
    try:
        said = repr(await case(store, ids))
    except LightningError as error:
        said = f"{type(error).__name__}: {error}"
    for name in sorted(set(dataclasses.astuple(ids)), key=len, reverse=True):
        said = said.replace(repr(name), "NAME")
    return said


@pytest.mark.parametrize("name", sorted(name for name, case in CASES.items() if case is not None))
async def test_what_is_anothers_answers_as_what_never_was(name: str, store: Store) -> None:
    case = CASES[name]
    assert case is not None
    await fill(store, "theirs", THEIRS)
    mine = ProjectStore(store, "mine")
    before = await everything(store)
    assert await outcome(case, mine, THEIRS) == await outcome(case, mine, UNKNOWN)
    assert await everything(store) == before
    owners = ProjectStore(store, "theirs")
    if name not in SAME_FOR_OWNERS:
        assert await outcome(case, owners, THEIRS) != await outcome(case, owners, UNKNOWN), "the case shows nothing"


async def everything(store: Store) -> str:
    """All that the project `theirs` has."""
    owner = ProjectStore(store, "theirs")
    asked = (
        "get_run", "list_rollouts", "transitions", "attempts_of", "spans", "steps", "metrics", "get_state",
        "get_token", "list_resources", "list_aliases", "resource_uses",
    )  # fmt: skip
    return "\n".join([repr(await CASES[name](owner, THEIRS)) for name in asked])  # type: ignore[misc]


async def test_an_id_that_is_taken_is_refused_and_nothing_is_told(store: Store) -> None:
    await fill(store, "theirs", THEIRS)
    mine = ProjectStore(store, "mine")
    with pytest.raises(ConflictError) as run:
        await mine.put_run(Run(THEIRS.run, "mine"))
    await mine.put_run(Run("mine", "mine"))
    with pytest.raises(ConflictError) as rollout:
        await mine.create_rollouts([Rollout(THEIRS.done, "mine", Task("x"), "g")])
    assert str(run.value) == "the id 'theirs' of a run is taken: choose another one"
    assert "theirs" not in str(rollout.value)
    with pytest.raises(DataError, match="of project 'theirs'"):
        await mine.put_run(Run("new", "mine", project="theirs"))


async def test_a_token_makes_tokens_of_its_project_only(store: Store) -> None:
    mine = ProjectStore(store, "mine")
    for project, scope in (("theirs", Scope.RUNNER), ("*", Scope.ADMIN)):
        with pytest.raises(DataError, match="makes nothing for"):
            await put_token(mine, issue_token(scope, project)[0])
    assert await list_tokens(store) == []


async def test_a_step_of_ones_own_says_nothing_of_anothers_rollout(store: Store) -> None:
    await fill(store, "theirs", THEIRS)
    mine = ProjectStore(store, "mine")
    await mine.put_run(Run("mine", "mine"))
    said = []
    for rollout in (THEIRS.live, UNKNOWN.live):
        with pytest.raises(StoreError) as refused:
            await mine.commit_step(record("mine", rollout))
        said.append(str(refused.value).replace(rollout, "IT"))
    assert said[0] == said[1]


async def test_what_a_prompt_earned_elsewhere_is_not_told(store: Store) -> None:
    await put_resource(store, Resource("writer", "bare"))
    for run, project in (
        ("ours", "default"),
        ("hidden", "theirs"),
    ):  # a trainer with the database itself uses bare names
        await store.put_run(Run(run, run, project=project))
        await store.create_rollouts([Rollout(f"{run}/0", run, Task("x"), "g", resources={"writer": 1})])
    assert {use.run for use in await resource_uses(store, "writer")} == {"ours", "hidden"}
    assert {use.run for use in await resource_uses(ProjectStore(store, "default"), "writer")} == {"ours"}


@pytest.mark.parametrize("project", ["mine", "default", None])
async def test_secrets_are_told_to_nobody(project: str | None, store: Store) -> None:
    await store.put_run(Run("run", "a run", project=project or "default"))
    for run in ("run", ""):
        await store.put_state(run, "gateway_secret", "5ec7e7")
        view = ProjectStore(store, project)
        assert await view.get_state(run, "gateway_secret") is None
        for write in (view.put_state, view.keep_state):
            with pytest.raises(StoreError):
                await write(run, "gateway_secret", "mine")
        assert await store.get_state(run, "gateway_secret") == "5ec7e7"


async def test_what_belongs_to_no_run_is_no_projects(store: Store) -> None:
    await store.put_state("", "fleet", 1)
    mine = ProjectStore(store, "default")
    assert await mine.get_state("", "fleet") is None
    with pytest.raises(StoreError, match="unknown"):
        await mine.put_state("", "fleet", 2)
    with pytest.raises(DataError):
        await mine.put_run(Run("", "the run of no run"))
    assert await ProjectStore(store, None).get_state("", "fleet") == 1


async def test_the_default_project_keeps_bare_names_and_sees_no_others(store: Store) -> None:
    await fill(store, "theirs", THEIRS)
    await put_resource(store, Resource("writer", "bare"))
    default = ProjectStore(store, "default")
    stored = {resource.name for resource in await list_resources(store)}
    assert stored == {"project::theirs::writer", "writer"}
    assert [resource.content for resource in await list_resources(default)] == ["bare"]
    assert await get_resource(default, "project::theirs::writer") is None
    assert await list_resources(default, "project::theirs::writer") == []
    with pytest.raises(DataError, match="reserved"):
        await put_resource(default, Resource("project::theirs::writer", "mine now"))


async def test_an_id_that_changed_hands_is_looked_up_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(store, "theirs", THEIRS)
    theirs = Projects(store).of("theirs")
    assert await theirs.steps(THEIRS.run)
    monkeypatch.setattr("lightning_server.projects.FORGET_AFTER", -1.0)

    async def pruned(run: str) -> Run:
        return Run(run, "somebody else's now", project="mine")

    monkeypatch.setattr(store, "get_run", pruned)
    assert await theirs.steps(THEIRS.run) == []


async def test_rollouts_that_were_listed_are_not_looked_up_one_by_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a trainer does in each step: it lists what has ended, then asks for the calls of all of it."""
    await fill(store, "theirs", THEIRS)
    asked: list[str] = []
    get_rollout = store.get_rollout

    async def counted(rollout: str) -> Rollout | None:
        asked.append(rollout)
        return await get_rollout(rollout)

    monkeypatch.setattr(store, "get_rollout", counted)
    theirs = ProjectStore(store, "theirs")
    page = await theirs.list_rollouts(THEIRS.run)
    calls = await theirs.transitions_of([(rollout.id, 1) for rollout in page.items])
    assert (len(calls), asked) == (3, [])
    assert not (await ProjectStore(store, "other").list_rollouts(THEIRS.run)).items
    with pytest.raises(StoreError, match="unknown"):
        await ProjectStore(store, "other").transitions(THEIRS.done)


def test_one_view_for_each_project() -> None:
    projects = Projects(MemoryStore())
    assert projects.of("a") is projects.of("a")
    assert projects.of("a") is not projects.of(None)


# non-interference ---------------------------------------------------------------------------------------------------
PROJECTS = ("default", "b")
NAMES = ("x", "y")
RUNS = tuple(f"{project}-{name}" for project in PROJECTS for name in NAMES)
Operation = tuple[str, str, str, str]
"""Who asks, what, of which run, with which name."""

OPERATIONS: dict[str, Callable[[Store, str, str], Awaitable[object]]] = {
    "put_run": lambda store, run, name: store.put_run(Run(run, name, created_at=1.0)),
    "create": lambda store, run, name: store.create_rollouts(
        [Rollout(f"{run}/{name}", run, Task(name), "g", resources={name: 1})]
    ),
    "get": lambda store, run, name: store.get_rollout(f"{run}/{name}"),
    "page": lambda store, run, name: store.list_rollouts(run),
    "lease": lambda store, run, name: store.lease(run, name, limit=1, ttl=60.0),
    "release": lambda store, run, name: store.release(name),
    "complete": lambda store, run, name: store.complete(f"{run}/{name}", 1, Outcome(reward=1.0)),
    "append": lambda store, run, name: store.append([call(f"{run}/{name}")]),
    "transitions": lambda store, run, name: store.transitions(f"{run}/{name}"),
    "commit": lambda store, run, name: store.commit_step(record(run, f"{run}/{name}", 1)),
    "steps": lambda store, run, name: store.steps(run),
    "runs": lambda store, run, name: store.list_runs(),
    "put": lambda store, run, name: put_resource(store, Resource(name, run, ResourceKind.PROMPT)),
    "resources": lambda store, run, name: list_resources(store),
    "alias": lambda store, run, name: set_alias(store, name, "live", 1),
    "back": lambda store, run, name: roll_back_alias(store, name, "live"),
    "aliases": lambda store, run, name: list_aliases(store),
    "uses": lambda store, run, name: resource_uses(store, name),
    "put_state": lambda store, run, name: store.put_state(run, name, run),
    "get_state": lambda store, run, name: store.get_state(run, name),
}
operations = st.lists(
    st.tuples(
        st.sampled_from(PROJECTS), st.sampled_from(sorted(OPERATIONS)), st.sampled_from(RUNS), st.sampled_from(NAMES)
    ),
    min_size=20,
    max_size=60,
)


async def play(steps: list[Operation]) -> list[tuple[Operation, str]]:
    """What each operation answered, without times."""
    store = MemoryStore()
    await store.open()
    said = []
    try:
        for step in steps:
            project, name, run, word = step
            try:
                answer = repr(await OPERATIONS[name](ProjectStore(store, project), run, word))
            except LightningError as error:
                answer = f"{type(error).__name__}: {error}"
            said.append((step, re.sub(r"\d+\.\d{2,}(e[+-]?\d+)?", "TIME", re.sub(r"cursor='\d+'", "cursor", answer))))
    finally:
        await store.close()
    return said


@settings(max_examples=12)
@given(steps=operations)
async def test_nothing_that_one_project_does_is_seen_by_another(steps: list[Operation]) -> None:
    owned = [step for step in steps if step[1] != "put_run" or step[2].startswith(step[0])]  # ids are one name space
    setup: list[Operation] = [(project, "put_run", f"{project}-x", "x") for project in PROJECTS]
    together = await play(setup + owned)
    for project in PROJECTS:
        alone = await play([step for step in setup + owned if step[0] == project])
        assert [line for line in together if line[0][0] == project] == alone


@pytest.mark.parametrize("project", ["a", None])
async def test_the_places_of_the_servers_are_no_runs_and_have_no_state_for_anybody(project: str | None) -> None:
    store = MemoryStore()
    await store.open()
    view = ProjectStore(store, project)
    await store.put_run(Run("gateway/traces", "x", project="a"))  # as one that was made before
    for run in ("gateway/traces", "policy/run", "policy/run/alive"):
        with pytest.raises(DataError, match="places of the servers"):
            await view.put_run(Run(run, "x"))
        for change in (view.put_state, view.keep_state):
            with pytest.raises(StoreError, match="is unknown"):
                await change(run, "f" * 32, ["theirs/live", 1, 9e9])
    await store.put_state("gateway/traces", "f" * 32, ["theirs/live", 1, 9e9])
    assert await view.get_state("gateway/traces", "f" * 32) is None

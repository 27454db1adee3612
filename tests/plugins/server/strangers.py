"""A stranger's plugin that brings operations to every store, and what holds of it whichever store it is."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from lightning.errors import StoreError
from lightning.plugins import Plugins
from lightning.store import Store
from lightning.types import Rollout, Run, Task
from lightning_server.api import app
from lightning_server.projects import ProjectStore

PLUGIN = '''
"""Judges say what they think of rollouts."""

from dataclasses import dataclass
from typing import Protocol

import lightning
from lightning.store.operation import ANY, RUN, OperationGroup, for_admins, operation


@dataclass(frozen=True)
class Verdict:
    """What a judge says of a rollout."""

    rollout: str
    judge: str
    text: str


class Verdicts(Protocol):
    async def put_verdict(self, rollout: str, verdict: Verdict, *, once: str = "") -> int:
        """Keep a verdict, and say how many the rollout has."""

    async def verdicts(self, rollout: str) -> list[Verdict]:
        """The verdicts of a rollout, oldest first."""

    async def judges(self, text: str) -> list[str]:
        """Who has ever said this."""


put_verdict = operation(Verdicts.put_verdict, "POST /rollouts/{rollout}/verdicts", RUN, body="verdict", answer="verdicts")
verdicts = operation(Verdicts.verdicts, "GET /rollouts/{rollout}/verdicts", ANY, empty=True)
judges = operation(Verdicts.judges, "POST /judges", RUN, answer="judges", owned=for_admins)
GROUP = OperationGroup(
    "NAME", (put_verdict, verdicts, judges), distribution="NAME-lab",
    parts={"sql": "lab_NAME_sql:PART", "redis": "lab_NAME_redis:FUNCTIONS"},
)


@lightning.hookimpl
def register_operations(register):
    register("NAME", lambda: GROUP)
'''

SQL = """
from lab_NAME import Verdict
from lightning.store.relational.transaction import SqlPart
from lightning.store.relational.transaction import done_once
from lightning.store.rollout_state import known_as


async def put(tx, rollout, verdict, once):
    async def insert():
        await tx.run("INSERT INTO NAME (rollout, judge, said) VALUES (?, ?, ?)", (rollout, verdict.judge, verdict.text))
        return len(await read(tx, rollout))

    return await done_once(tx, known_as(once, "put_verdict", rollout, verdict.judge, verdict.text), "", insert)


async def read(tx, rollout):
    rows = await tx.all("SELECT rollout, judge, said FROM NAME WHERE rollout = ? ORDER BY n", (rollout,))
    return [Verdict(*row) for row in rows]


async def judges(tx, text):
    return [row[0] for row in await tx.all("SELECT DISTINCT judge FROM NAME WHERE said = ? ORDER BY judge", (text,))]


TABLE = "CREATE TABLE NAME (n INTEGER PRIMARY KEY, rollout TEXT NOT NULL, judge TEXT NOT NULL, said TEXT NOT NULL)"
PART = SqlPart(
    reads={"verdicts": read, "judges": judges}, writes={"put_verdict": put},
    tables=((TABLE, "CREATE INDEX NAME_by_rollout ON NAME (rollout, n)"),),
)
"""


@pytest.fixture
def lab(install: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Installs a stranger's plugin, whose operations this process and its servers then have."""

    def make(name: str = "verdicts", redis: str = "", **changes: str) -> ModuleType:
        sources = {f"lab_{name}": PLUGIN, f"lab_{name}_sql": SQL, f"lab_{name}_redis": redis}
        for old, new in changes.items():
            sources = {module: source.replace(old, new) for module, source in sources.items()}
        sources = {module: source.replace("NAME", name) for module, source in sources.items()}
        install(f"{name}-lab", {name: f"lab_{name}"}, sources)
        found = Plugins()
        monkeypatch.setattr(app, "plugins", lambda: found)
        return __import__(f"lab_{name}")

    return make


async def check_answers(here: Any, store: Store) -> None:
    """The operations do what they say, and once under an id."""
    await store.put_run(Run("run", "a run"))
    await store.create_rollouts([Rollout(name, "run", Task("q"), "g") for name in "ab"])
    assert await here.verdicts(store, "a") == []
    assert await here.put_verdict(store, "a", here.Verdict("a", "ann", "well done"), once="1") == 1
    assert await here.put_verdict(store, "a", here.Verdict("a", "bob", "too long")) == 2
    assert await here.put_verdict(store, "a", here.Verdict("a", "ann", "well done"), once="1") == 1
    assert await here.put_verdict(store, "b", here.Verdict("b", "bob", "well done")) == 1
    assert await here.verdicts(store, "a") == [
        here.Verdict("a", "ann", "well done"),
        here.Verdict("a", "bob", "too long"),
    ]
    assert await here.judges(store, "well done") == ["ann", "bob"]


async def check_projects(here: Any, store: Store) -> None:
    """A project sees what is its own."""
    for project in ("mine", "theirs"):
        await store.put_run(Run(project, "a run", project=project))
        await store.create_rollouts([Rollout(f"{project}/0", project, Task("q"), "g")])
    mine, theirs = ProjectStore(store, "mine"), ProjectStore(store, "theirs")
    assert await here.put_verdict(theirs, "theirs/0", here.Verdict("theirs/0", "ann", "well done")) == 1
    with pytest.raises(StoreError, match="rollout 'theirs/0' is unknown"):
        await here.put_verdict(mine, "theirs/0", here.Verdict("theirs/0", "ann", "well done"))
    assert await here.verdicts(mine, "theirs/0") == []
    assert len(await here.verdicts(theirs, "theirs/0")) == 1
    with pytest.raises(StoreError, match="judges is for admins of all projects, and this token is of project 'mine'"):
        await here.judges(mine, "well done")
    assert await here.judges(ProjectStore(store, None), "well done") == ["ann"]

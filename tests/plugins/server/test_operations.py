"""A method and a line in the table of operations are a request, a route, a description and a project's refusal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from lightning.errors import StoreError
from lightning.store.memory import MemoryStore
from lightning.store.operation import ANY, LOOK, TRAIN, HttpLine, Operation, Operations, operations_of
from lightning.types import Rollout, Run, Scope, Task
from lightning_server.api import app
from lightning_server.api.openapi import describe
from lightning_server.api.store_routes import route_of
from lightning_server.http_store import HttpStore
from lightning_server.operations import LINES, over_http

from tests.servers.control import ControlServer


@dataclass(frozen=True)
class Note:
    """What somebody says of a rollout."""

    rollout: str
    text: str


class NotingStore(MemoryStore):
    """A store with operations of a later release."""

    async def note(self, run: str, text: str, *, loud: bool = False, once: str = "") -> int:
        """Keep a note with a run, and say how long it is."""
        await self.put_state(run, "note", text.upper() if loud else text, once=once)
        return len(text)

    async def get_note(self, run: str, *, most: int = 80) -> Note | None:
        """The note of a run, `most` characters of it."""
        text = await self.get_state(run, "note")
        return None if text is None else Note(run, str(text)[:most])

    async def notes(self, attempts: Sequence[tuple[str, int]]) -> list[Note]:
        """Notes of attempts."""
        return [Note(rollout, f"of {attempt}") for rollout, attempt in attempts]


ADDED = (
    Operation(NotingStore.note, HttpLine("POST /runs/{run}/note", TRAIN, answer="length")),
    Operation(
        NotingStore.get_note,
        HttpLine("GET /runs/{run}/note", ANY, missing="POST one", query={"most": "Characters at most."}),
    ),
    Operation(NotingStore.notes, HttpLine("POST /notes/read", LOOK, answer="notes")),
)


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table with three more lines."""
    for operation in ADDED:
        monkeypatch.setattr(Operations, operation.name, operation, raising=False)
    monkeypatch.setattr(app, "ROUTES", (*app.ROUTES, *(route_of(over_http(added)) for added in ADDED)))


async def test_a_line_in_the_table_is_a_route_a_call_a_description_and_a_refusal(
    noting: None, control: ControlServer
) -> None:
    store = NotingStore()
    url, token = control.add(store, scope=Scope.TRAINER)

    async def fill() -> None:
        await store.put_run(Run("run", "a run"))
        await store.put_run(Run("theirs", "a run", project="theirs"))
        await store.create_rollouts([Rollout(f"{run}/0", run, Task("q"), "g") for run in ("run", "theirs")])

    control.run(fill())
    client: Any = HttpStore(url, token=token, patience=5)
    await client.open()
    try:
        assert await client.get_note("run") is None
        assert await client.note("run", "hello", loud=True) == 5
        assert await client.get_note("run", most=4) == Note("run", "HELL")
        assert await client.notes([("run/0", 1), ("run/0", 2)]) == [Note("run/0", "of 1"), Note("run/0", "of 2")]
        for refused in (client.note("theirs", "x"), client.get_note("theirs"), client.notes([("theirs/0", 1)])):
            with pytest.raises(StoreError, match="is unknown: create it"):
                await refused
    finally:
        await client.close()
    paths: Any = describe(app.ROUTES)["paths"]
    described = paths["/api/v1/runs/{run}/note"]
    assert described["post"]["description"] == "Keep a note with a run, and say how long it is. Scopes: trainer, admin."
    assert [part["name"] for part in described["post"]["parameters"]] == ["run", "idempotency-key"]
    assert [part["name"] for part in described["get"]["parameters"]] == ["run", "most"]


def test_each_operation_of_the_store_has_a_line_and_no_line_is_of_nothing() -> None:
    own = [operation.name for operation in operations_of(Operations)]
    assert own == list(LINES)


def test_parameters_of_a_query_must_be_explained() -> None:
    async def unsaid(store: object, run: str, since: float) -> list[str]:
        """Something of a run."""
        return []

    with pytest.raises(TypeError, match="does not say what its parameters mean"):
        over_http(Operation(unsaid, HttpLine("GET /runs/{run}/unsaid", ANY)))

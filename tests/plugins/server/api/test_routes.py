"""The table of routes: each is described, each has a scope, and the scopes are what they should be."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.trainer.context import mark_over
from lightning.types import Scope
from lightning_server.api.app import Limits, description, routes
from lightning_server.api.openapi import scopes_of
from lightning_server.api.table import Route, nothing_there, parameters
from lightning_server.messages import PREFIX

from .conftest import World, connection, make_world

PUBLIC = {"health", "openapi"}
WRITES = {
    "put_run": "trainer",
    "create_rollouts": "trainer",
    "append": "trainer",
    "commit_step": "trainer",
    "log_metrics": "trainer",
    "put_state": "trainer",
    "keep_state": "trainer",
    "put_resource": "trainer",
    "set_alias": "trainer",
    "roll_back_alias": "trainer",
    "lease": "runner trainer",
    "renew": "runner trainer",
    "complete": "runner trainer",
    "release": "runner trainer",
    "append_spans": "runner trainer",
    "put_token": "",
    "revoke_token": "",
}
"""Who may change what, beside admins."""


def filled(route: Route) -> str:
    """A path that the route matches; the run that the state and the news are of is one of the project."""
    path = re.sub(r"\{attempt\}", "1", route.path).replace("{", "").replace("}", "")
    return f"{path}?run=run" if "run" in parameters(route.query) else path


@pytest.mark.parametrize("route", routes(), ids=lambda route: route.name)
def test_every_route_is_described(route: Route) -> None:
    operation: Any = description()["paths"][PREFIX + route.path][route.method.lower()]  # type: ignore[index, call-overload]
    assert operation["operationId"] == route.name
    assert len(operation["description"]) > 20
    assert {p["name"] for p in operation["parameters"] if p["in"] == "path"} == set(re.findall(r"{(\w+)}", route.path))
    assert ("requestBody" in operation) == (route.body is not None)
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert all(p["description"] for p in operation["parameters"] if p["in"] == "query")


def test_nothing_else_is_described_and_no_name_is_used_twice() -> None:
    described = [(method, path) for path, methods in description()["paths"].items() for method in methods]  # type: ignore[attr-defined, union-attr]
    assert len(described) == len(routes()) == len({route.name for route in routes()})


def test_every_reference_of_the_description_leads_somewhere() -> None:
    found = description()
    for kind, name in re.findall(r"#/components/(\w+)/(\w+)", repr(found)):
        assert name in found["components"][kind]  # type: ignore[index, call-overload, operator]


@pytest.mark.parametrize("route", routes(), ids=lambda route: route.name)
def test_who_may_use_a_route(route: Route) -> None:
    if route.name in PUBLIC:
        assert route.scopes is None
    elif route.name in WRITES:
        assert scopes_of(route) == (*WRITES[route.name].split(), "admin")
    else:
        assert route.method == "GET" or route.name in ("transitions_of", "attempts_of"), (
            "what changes something is in WRITES"
        )
        assert Scope.TRAINER in (route.scopes or ()) or "tokens" in route.path


@pytest.mark.parametrize("route", routes(), ids=lambda route: route.name)
async def test_a_scope_opens_its_routes_and_no_others(world: World, route: Route) -> None:
    allowed = scopes_of(route)
    for scope in ("", "viewer", "runner", "trainer", "admin"):
        answer = await world.ask(route.method, filled(route), token=scope)
        if route.scopes is None:
            assert answer.status == 200
        elif not scope:
            assert (answer.status, answer.error) == (401, "missing_token")
            assert answer.headers["www-authenticate"].startswith("Bearer")
        elif scope not in allowed:
            assert (answer.status, answer.error) == (403, "forbidden")
        else:
            assert answer.status not in (401, 403)
            assert answer.status < 500


async def test_what_belongs_to_the_whole_store_is_for_admins(world: World) -> None:
    for method, target, body in (
        ("GET", "/state/fleet", None),
        ("PUT", "/state/fleet", {"value": 1}),
        ("GET", "/watch", None),
    ):
        assert (await world.ask(method, target, body, token="trainer")).status == 403
        assert (await world.ask(method, target, body)).status == 200
        separator = "&" if "?" in target else "?"
        assert (await world.ask(method, f"{target}{separator}run=run", body, token="trainer")).status == 200


async def test_a_viewer_reads_the_state_of_a_run_and_writes_none(world: World) -> None:
    await world.store.put_state("run", "note", "seen")
    await world.store.put_state("theirs", "note", "hidden")
    for token, status in (("viewer", 200), ("runner", 403), ("", 401)):
        assert (await world.ask("GET", "/state/note?run=run", token=token)).status == status
    assert (await world.ask("GET", "/state/note?run=run", token="viewer")).json == {"value": "seen"}
    assert (await world.ask("GET", "/state/note?run=theirs", token="viewer")).json == {"value": None}
    assert (await world.ask("GET", "/state/fleet", token="viewer")).status == 403
    for method, target in (("PUT", "/state/note?run=run"), ("POST", "/state/note/keep?run=run")):
        assert (await world.ask(method, target, {"value": "mine"}, token="viewer")).status == 403
    assert await world.store.get_state("run", "note") == "seen"


async def test_secrets_are_for_nobody(world: World) -> None:
    await world.store.put_state("run", "gateway_secret", "hush")
    for token in ("admin", "trainer", "viewer"):
        read = await world.ask("GET", "/state/gateway_secret?run=run", token=token)
        assert read.json == {"value": None}
    for token in ("admin", "trainer"):
        for method, target in (
            ("PUT", "/state/gateway_secret?run=run"),
            ("POST", "/state/gateway_secret/keep?run=run"),
        ):
            answer = await world.ask(method, target, {"value": "mine"}, token=token)
            assert answer.status == 422
            assert b"hush" not in answer.body
    assert await world.store.get_state("run", "gateway_secret") == "hush"


async def test_a_project_sees_its_own_runs(world: World) -> None:
    assert [run["id"] for run in (await world.ask("GET", "/runs", token="viewer")).json["items"]] == ["run"]
    assert [run["id"] for run in (await world.ask("GET", "/runs")).json["items"]] == ["theirs", "run"]
    assert (await world.ask("GET", "/runs/theirs", token="viewer")).status == 404
    assert (await world.ask("GET", "/watch?run=theirs", token="viewer")).status == 422


async def test_too_many_requests_are_told_to_come_again() -> None:
    world = await make_world(limits=Limits(requests=0, watches=0))
    for target in ("/runs", "/watch?run=run"):
        answer = await world.ask("GET", target)
        assert (answer.status, answer.error, answer.headers["retry-after"]) == (429, "busy", "1")
    assert (await world.ask("GET", "/health", token="")).status == 200  # busy is not dead
    await world.store.close()


async def test_one_token_gets_a_quarter_of_the_room_and_bodies_that_do_not_come_none() -> None:
    world = await make_world(limits=Limits(requests=8, queued=1, queue_seconds=0.05))

    async def ask_without_end(message: Any) -> None:
        raise AssertionError(f"it was answered: {message}")

    async def never() -> Any:
        await asyncio.Event().wait()

    scope = connection("POST", "/runs", world.authorization("trainer"))
    slow = [asyncio.create_task(world.api(scope, never, ask_without_end)) for _ in range(2)]
    await asyncio.sleep(0.01)
    waited, refused = await asyncio.gather(*(world.ask("GET", "/runs", token="trainer") for _ in range(2)))
    for answer, why in ((waited, "had no turn in 0.05 s"), (refused, "wait for their turn")):
        assert (answer.status, answer.error, answer.headers["retry-after"]) == (429, "busy", "1")
        assert "of this token" in answer.json["error"]["message"]
        assert why in answer.json["error"]["message"]
    assert (await world.ask("GET", "/runs", token="viewer")).status == 200
    assert not world.api._serving[False], "a body that does not come takes no room"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert (await world.ask("GET", "/runs", token="trainer")).status == 200
    await world.store.close()


def test_the_api_has_no_word_of_this_machine() -> None:
    assert str(Path.home()) not in repr(description())


async def test_requests_of_one_token_wait_for_their_turn() -> None:
    """A fleet of clients shares a token: none of its requests is refused only because others are on their way."""
    world = await make_world(limits=Limits(requests=4))
    assert {(await asked).status for asked in [asyncio.create_task(world.ask("GET", "/runs")) for _ in range(50)]} == {
        200
    }
    assert world.api._asking == {}
    await world.store.close()


async def test_a_lease_of_no_run_is_not_found_and_the_end_of_a_run_is_told() -> None:
    world = await make_world()
    wanted = {"run": "nobody's", "worker": "w"}
    missing = await world.ask("POST", "/leases", wanted, token="runner")
    assert (missing.status, missing.error) == (404, "not_found")
    answers = []
    await world.ask("POST", "/leases", {"run": "run", "worker": "other", "limit": 100}, token="runner")
    for over in (False, True, False):
        await mark_over(world.store, "run", over)
        answers.append((await world.ask("POST", "/leases", {**wanted, "run": "run"}, token="runner")).json)
    assert [(answer["leases"], answer["over"]) for answer in answers] == [([], False), ([], True), ([], False)]
    await world.store.close()


def test_what_is_not_there_is_told_with_its_cure_where_one_is_known() -> None:
    assert nothing_there("memo 'a'", "").message == "There is no memo 'a'."
    assert nothing_there("run 'a'", "GET /runs lists those there are").message.endswith(
        "'a': GET /runs lists those there are"
    )

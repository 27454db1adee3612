"""The API driven by its own description: no fault, no hang, and answers that are what was described."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lightning.store.memory import MemoryStore
from lightning.types import Outcome, Rollout, Run, Task
from lightning_resources.nouns import Resource
from lightning_resources.operations import put_resource, set_alias
from lightning_server import json_codec, messages
from lightning_server.api.app import description, routes
from lightning_server.api.table import Route
from lightning_server.messages import PREFIX

from tests.servers.control import ControlServer

EXAMPLES = 6
SLOWEST = 10.0
"""Seconds for one answer; nothing here takes longer than milliseconds on a quiet machine."""
KNOWN = {
    "run": "run",
    "rollout": "run/0",
    "attempt": 1,
    "key": "k",
    "name": "writer",
    "alias": "production",
    "which": "1",
}
"""Ids that exist, so that half of the requests get beyond the first look-up."""
BY_LABEL = {f"{route.method} {PREFIX}{route.path}": route for route in routes()}


@pytest.fixture(scope="module")
def served() -> Any:
    with ControlServer() as server:
        store = MemoryStore()
        url, token = server.add(store)

        async def fill() -> None:
            await store.put_run(Run("run", "a run"))
            await store.create_rollouts([Rollout(f"run/{i}", "run", Task("q"), "g") for i in range(3)])
            await store.lease("run", "w", limit=2)
            await store.complete("run/1", 1, Outcome(reward=1.0))
            await put_resource(store, Resource("writer", "text"))
            await set_alias(store, "writer", "production", 1)

        server.run(fill())
        yield url, {"Authorization": f"Bearer {token}"}


def operations() -> list[Any]:
    import schemathesis

    return [found.ok() for found in schemathesis.openapi.from_dict(dict(description())).get_all_operations()]


def check(route: Route, answer: Any, seconds: float) -> None:
    """The status and the body are among those that the description has for the route."""
    operation: Any = description()["paths"][PREFIX + route.path][route.method.lower()]  # type: ignore[index, call-overload]
    assert str(answer.status_code) in operation["responses"], answer.text
    assert seconds < SLOWEST
    if answer.status_code == 200:
        json_codec.codec_of(route.answer).decode(json_codec.read(answer.content, "it"), "it", True)
    else:
        failure = json_codec.codec_of(messages.Failure).decode(json_codec.read(answer.content, "it"), "it", True)
        assert failure.error.type
        assert len(failure.error.message) > 10


def drive(operation: Any, mode: Any, url: str, headers: dict[str, str]) -> int:
    """Send what a mode makes of an operation, and check the answers; returns how many there were."""
    route, asked = BY_LABEL[operation.label], 0

    @settings(max_examples=EXAMPLES, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode), st.booleans())
    def ask(case: Any, known: bool) -> None:
        nonlocal asked
        if known:
            there = {name: KNOWN[name] for name in case.path_parameters if name in KNOWN}
            case.path_parameters = {**case.path_parameters, **there}
        if case.query and "timeout" in case.query:
            case.query["timeout"] = 0.01
        began = time.monotonic()
        check(route, case.call(base_url=url, headers=headers, timeout=2 * SLOWEST), time.monotonic() - began)
        asked += 1

    ask()
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("good", [True, False], ids=["as described", "not as described"])
def test_nothing_a_client_can_send_is_a_fault(served: tuple[str, dict[str, str]], good: bool) -> None:
    import schemathesis

    mode = schemathesis.GenerationMode.POSITIVE if good else schemathesis.GenerationMode.NEGATIVE
    # what needs no token takes nothing that could be wrong
    chosen = [operation for operation in operations() if good or BY_LABEL[operation.label].scopes is not None]
    assert sum(drive(operation, mode, *served) for operation in chosen) >= len(chosen)

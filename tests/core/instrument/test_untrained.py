"""Calls that the agent's code leaves out of training: around them, and after them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from lightning.errors import DataError
from lightning.instrument import (
    ActiveAttempt,
    activate,
    component,
    component_path,
    install_tap,
    mark_request,
    reject,
    untrained,
)
from lightning.plugins import plugins
from lightning.runner.outcomes import decode_outcome, encode_outcome, returned
from lightning.types import LLM

LLM_ = LLM("http://127.0.0.1:1/v1", "key", "policy")
HEADER = "x-lightning-untrained"


@pytest.fixture
def attempt() -> Iterator[ActiveAttempt]:
    undo = install_tap()
    with activate(LLM_) as active:
        yield active
    undo()


def sent(**headers: str) -> str:
    """What a request that is sent here says of itself."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return {**named, **mark_request(f"{LLM_.base_url}/chat/completions", named.items()).added}.get(HEADER, "")


def test_calls_inside_say_why_and_the_innermost_block_counts(attempt: ActiveAttempt) -> None:
    assert sent() == ""
    with component("team"), untrained(" title "), component("namer"):
        assert (sent(), component_path()) == ("title", ("team", "namer"))
        with untrained("summary"):
            assert sent() == "summary"
        assert sent(x_lightning_untrained="by the client") == "by the client"
    assert (sent(), component_path()) == ("", ())


def test_a_request_that_is_sent_twice_is_marked_anew_and_keeps_what_its_client_said(attempt: ActiveAttempt) -> None:
    url, seen = f"{LLM_.base_url}/chat/completions", list[tuple[str, str]]()

    def reply(request: httpx.Request) -> httpx.Response:
        seen.append((request.headers.get(HEADER, ""), request.headers.get("x-lightning-caller", "")))
        return httpx.Response(200)

    with httpx.Client(transport=httpx.MockTransport(reply)) as client:
        for request in (httpx.Request("POST", url), httpx.Request("POST", url, headers={HEADER: "its own"})):
            with component("namer"), untrained("title"):
                client.send(request)
            client.send(request)
            with untrained("summary"):
                client.send(request)
    assert [said for said, _ in seen] == ["title", "", "summary", *["its own"] * 3]
    assert ["namer" in caller for _, caller in seen] == [True, False, False] * 2


async def test_it_holds_in_threads_and_tasks_that_are_started_inside_and_in_no_other(attempt: ActiveAttempt) -> None:
    found: list[str] = []
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        outside = asyncio.create_task(asyncio.sleep(0.01, "done"))
        stack.enter_context(untrained("title"))
        thread = threading.Thread(target=lambda: found.append(sent()))
        thread.start()
        thread.join()
        found.append(pool.submit(sent).result())
        found.append(await asyncio.create_task(asyncio.to_thread(sent)))
        await outside
    assert found == ["title"] * 3
    assert sent() == ""


def test_as_a_decorator_and_around_a_generator_it_does_not_leak(attempt: ActiveAttempt) -> None:
    @untrained("plans")
    def plan() -> Iterator[str]:
        yield sent()
        yield sent()

    def summary() -> Iterator[str]:
        with untrained("summary"):
            yield sent()

    assert [(said, sent()) for said in plan()] == [("plans", "")] * 2
    assert [(said, sent()) for said in summary()] == [("summary", "")]


def test_a_call_is_rejected_after_its_answer(attempt: ActiveAttempt, caplog: pytest.LogCaptureFixture) -> None:
    reject("too early")
    assert "rejected nothing: which call was the last one is not known here" in caplog.text
    for name in ("a", "b"):
        attempt.calls.add(name, "agent")
    reject()
    reject("unreadable", response_id="a")
    reject("unreadable, twice", response_id="a")
    outcome = returned(1.0, attempt, 0.0)
    assert outcome.untrained == {"b": "rejected", "a": "unreadable, twice"}
    assert decode_outcome(encode_outcome(outcome)) == outcome


def test_outside_of_a_rollout_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    with untrained("title"):
        reject("rejected", response_id="a")
    assert "lightning.reject() was called outside a rollout and did nothing" in caplog.text


@pytest.mark.parametrize("reason", ["", "r" * 81, "two\nlines", None])
def test_a_reason_that_is_none_is_refused(attempt: ActiveAttempt, reason: object) -> None:
    for use in (untrained, reject):
        with pytest.raises(DataError, match="say in 1 to 80 printable ASCII characters why the call is not trained"):
            use(reason)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="give the `id` of the model's reply"):
        reject("x", response_id=3)  # type: ignore[arg-type]


def test_an_adapter_says_it_and_its_failure_costs_nothing(
    attempt: ActiveAttempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[object] = ["title"]

    def hook() -> object:
        return said[0]

    monkeypatch.setattr(plugins().hook, "lightning_untrained", hook)
    assert sent() == "title"
    with untrained("of the user"):
        assert sent() == "of the user"
    said[0] = "\n"
    assert sent() == ""
    assert "an adapter failed to say whether a call is trained, so it is" in caplog.text

"""Spans that begin in a rollout are its children, and OpenTelemetry is as it was afterwards."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import httpx
import pytest
from lightning import instrument
from lightning.instrument import install_tap
from lightning.instrument.context import root_span_id, trace_id_of, traceparent_of
from lightning.testing.chat_server import ChatServer
from lightning.types import LLM, Task
from lightning_otel.traces.parents import ParentsStage
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.sdk.trace import TracerProvider

ONE = LLM("http://127.0.0.1:8000/v1", "one", "policy")
TWO = LLM("http://127.0.0.1:8000/v1", "two", "policy")


@contextmanager
def activate(llm: LLM) -> Iterator[instrument.ActiveAttempt]:
    """An attempt inside what the stage puts around it."""
    with instrument.activate(llm) as attempt, ParentsStage().around(Task(input=None), llm) or nullcontext():
        yield attempt


def injected() -> str:
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers.get("traceparent", "")


def test_ids_are_computed_alike_by_everybody() -> None:
    import hashlib

    trace_id = hashlib.sha256(b"one").digest()[:16]
    assert trace_id_of("one") == trace_id.hex()
    assert traceparent_of("one") == f"00-{trace_id.hex()}-{hashlib.sha256(trace_id).hexdigest()[:16]}-01"


def test_instrumented_clients_send_the_rollouts_trace_and_nothing_afterwards() -> None:
    with activate(ONE) as session:
        assert injected() == session.traceparent == traceparent_of("one")
        with activate(TWO):
            assert injected() == traceparent_of("two")
        assert injected() == traceparent_of("one")
    assert injected() == ""


def test_the_users_own_spans_become_children_and_their_context_comes_back() -> None:
    tracer = TracerProvider().get_tracer("test")
    kept = context.attach(baggage.set_baggage("user", "7"))
    try:
        with tracer.start_as_current_span("around") as around:
            with activate(ONE), tracer.start_as_current_span("inside") as inside:
                assert baggage.get_baggage("user") == "7"
                found = inside.get_span_context()
                assert (trace.format_trace_id(found.trace_id), found.trace_flags.sampled) == (trace_id_of("one"), True)
                assert inside.parent is not None  # type: ignore[attr-defined]
                assert trace.format_span_id(inside.parent.span_id) == root_span_id(trace_id_of("one"))  # type: ignore[attr-defined]
            assert trace.get_current_span() is around
    finally:
        context.detach(kept)


async def test_rollouts_beside_one_another_have_their_own(caplog: pytest.LogCaptureFixture) -> None:
    async def run(llm: LLM) -> None:
        with activate(llm):
            for _ in range(5):
                assert injected() == traceparent_of(llm.api_key)
                await asyncio.sleep(0)
                assert await asyncio.to_thread(injected) == traceparent_of(llm.api_key)

    await asyncio.gather(run(ONE), run(TWO))
    assert injected() == ""
    assert not caplog.records


def test_an_attempt_without_a_key_has_no_trace() -> None:
    with activate(LLM("http://127.0.0.1:8000/v1", "", "policy")) as session:
        assert (session.traceparent, injected()) == ("", "")


def test_an_exception_leaves_the_context_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    def careless() -> None:
        with activate(ONE):
            context.attach(context.set_value("left", "behind"))
            raise KeyError

    with pytest.raises(KeyError):
        careless()
    assert (injected(), context.get_value("left")) == ("", None)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


LATE = """
import contextvars, sys
from lightning_otel.traces.parents import parent_of_spans
from lightning.instrument.context import traceparent_of

def agent():
    from opentelemetry import propagate
    headers = {{}}
    propagate.inject(headers)
    return headers.get("traceparent")

meta = list(sys.meta_path)
with parent_of_spans("one"):
    assert not any(name.startswith("opentelemetry") for name in sys.modules)
    {call}
assert sys.meta_path == meta
assert agent() is None
with parent_of_spans("one"):
    assert agent() == traceparent_of("one")
assert agent() is None
"""


@pytest.mark.parametrize("how", ["agent()", "contextvars.copy_context().run(agent)"])
def test_an_agent_that_imports_it_late_has_the_parent_from_then_on(how: str) -> None:
    script = textwrap.dedent(LATE).format(call=f"assert {how} == traceparent_of('one')")
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


BESIDE = """
import asyncio
from lightning_otel.traces.parents import parent_of_spans
from lightning.instrument.context import traceparent_of

def injected():
    from opentelemetry import propagate
    headers = {}
    propagate.inject(headers)
    return headers.get("traceparent")

async def run(key, begun, importing):
    with parent_of_spans(key):
        begun.set()
        await importing.wait()
        return injected()

async def main():
    begun, importing = [asyncio.Event() for _ in "abc"], asyncio.Event()
    running = [asyncio.create_task(run(key, event, importing)) for key, event in zip("abc", begun)]
    for event in begun:
        await event.wait()
    importing.set()
    found = await asyncio.gather(*running)
    assert found == [traceparent_of("a"), None, None], found

asyncio.run(main())
assert injected() is None
"""


def test_the_rollout_that_imports_it_does_not_get_the_parent_of_another() -> None:
    ran = subprocess.run([sys.executable, "-c", BESIDE], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_model_call_carries_the_trace_unless_the_client_says_where_it_is() -> None:
    undo = install_tap()
    mine = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    try:
        with ChatServer() as server, activate(server.llm("one")) as session, httpx.Client() as client:
            body = {"model": "policy", "messages": [{"role": "user", "content": "x"}]}
            for headers in ({}, {"traceparent": mine}):
                client.post(f"{session.llm.base_url}/chat/completions", json=body, headers=headers)
            sent = [call.headers.get("traceparent") for call in server.calls]
    finally:
        undo()
    assert sent == [traceparent_of("one"), mine]

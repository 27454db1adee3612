"""Spans arrive over OTLP/HTTP and are stored under the attempt they belong to, or not at all."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import zlib

import httpx
import pytest
from lightning.errors import StoreError
from lightning.gateway import identity
from lightning.gateway.identity import TokenSigner
from lightning.instrument.context import root_span_id, trace_id_of
from lightning.store.memory import MemoryStore
from lightning.types import LLM, Fault, Outcome
from lightning_otel.traces import book as trace_book
from lightning_otel.traces import endpoint as span_endpoint
from lightning_otel.traces.book import TraceBook
from lightning_otel.traces.store import spans
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context

JSON, PROTOBUF = "application/json", "application/x-protobuf"


def span(trace_id: str, number: int = 1, **fields: object) -> dict[str, object]:
    made = {"traceId": trace_id, "spanId": f"{number:016x}", "name": "work", "startTimeUnixNano": "1500000000"}
    return {**made, "endTimeUnixNano": 2500000000, "kind": 2, **fields}


def request(*spans: dict[str, object]) -> bytes:
    service = {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]}
    return json.dumps({"resourceSpans": [{"resource": service, "scopeSpans": [{"spans": spans}]}]}).encode()


@pytest.fixture
async def post(house):
    """`await post(body, **headers)` without any key."""
    async with httpx.AsyncClient(base_url=f"{house.gateway.url}/v1", timeout=20) as client:

        async def send(body: bytes, path: str = "traces", **headers: str) -> httpx.Response:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.post(path, content=body, headers={"content-type": JSON, **named})

        yield send


def sdk(llm: LLM, exporter: object) -> TracerProvider:
    """The SDK of a service that works under the rollout's traceparent."""
    provider = TracerProvider(resource=Resource.create({"service.name": "shop"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))  # type: ignore[arg-type]
    return provider


def work(llm: LLM, provider: TracerProvider) -> None:
    trace_id = trace_id_of(llm.api_key)
    parent = SpanContext(int(trace_id, 16), int(root_span_id(trace_id), 16), is_remote=True, trace_flags=TraceFlags(1))
    tracer = provider.get_tracer("shop")
    attributes = {
        "text": "π",
        "yes": True,
        "count": -(2**62),
        "share": 0.5,
        "names": ["a", "b"],
        "long": "x" * 10_000,
        "gen_ai.operation.name": "execute_tool",
    }
    with (
        pytest.raises(KeyError),
        tracer.start_as_current_span(
            "execute_tool look",
            set_span_in_context(NonRecordingSpan(parent)),
            kind=SpanKind.SERVER,
            attributes=attributes,
        ),
        tracer.start_as_current_span("inner"),
    ):
        raise KeyError("gone")
    provider.shutdown()


async def test_the_sdk_exports_in_protobuf_and_the_json_of_the_same_spans_says_the_same(house, post) -> None:
    import asyncio

    llm = await house.llm()
    exporter = OTLPSpanExporter(endpoint=f"{llm.base_url}/traces")
    memory = InMemorySpanExporter()
    provider = sdk(llm, exporter)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    await asyncio.to_thread(work, llm, provider)
    tool, inner = await spans(house.store, "rollout-0")
    trace_id = trace_id_of(llm.api_key)
    assert (tool.trace_id, tool.parent_id, inner.parent_id) == (trace_id, root_span_id(trace_id), tool.span_id)
    assert (tool.name, tool.kind, tool.service, inner.kind) == ("execute_tool look", "server", "shop", "internal")
    assert (tool.status, tool.error, inner.error) == ("error", "KeyError: 'gone'", "KeyError: 'gone'")
    assert tool.started_at <= inner.started_at <= inner.ended_at <= tool.ended_at
    attributes = dict(tool.attributes)
    assert len(attributes.pop("long")) == 4096
    assert attributes == {
        "text": "π",
        "yes": True,
        "count": -(2**62),
        "share": 0.5,
        "names": ["a", "b"],
        "gen_ai.operation.name": "execute_tool",
    }

    from google.protobuf.json_format import MessageToDict

    same = MessageToDict(encode_spans(memory.get_finished_spans()))
    for one in same["resourceSpans"][0]["scopeSpans"][0]["spans"]:  # protobuf's own JSON has base64, OTLP's has not
        for key in ("traceId", "spanId", "parentSpanId"):
            one[key] = __import__("base64").b64decode(one[key]).hex().upper()
        one["kind"] = {"SPAN_KIND_SERVER": 2, "SPAN_KIND_INTERNAL": 1}[one["kind"]]
        one["status"]["code"] = {"STATUS_CODE_ERROR": 2}[one["status"]["code"]]
    second = await house.llm()
    body = json.dumps(same).replace(trace_id.upper(), trace_id_of(second.api_key)).encode()
    reply = await post(body)
    assert (reply.status_code, reply.json(), reply.headers["content-type"]) == (200, {}, JSON)
    found = await spans(house.store, "rollout-1")
    assert [(s.name, s.span_id, s.started_at, s.status, s.error, s.attributes) for s in found] == [
        (s.name, s.span_id, s.started_at, s.status, s.error, s.attributes) for s in (tool, inner)
    ]


@pytest.mark.parametrize("how", ["bearer", "header", "url"])
async def test_a_key_gives_the_spans_of_any_trace_to_its_rollout(house, post, how: str) -> None:
    llm = await house.llm()
    body = request(span("a" * 32, parentSpanId="b" * 16))
    headers = {"bearer": {"authorization": f"Bearer {llm.api_key}"}, "header": {"x_lightning_rollout": llm.api_key}}
    path = f"{llm.url_with_token}/traces" if how == "url" else "traces"
    reply = await post(body, path, **headers.get(how, {}))
    assert (reply.status_code, reply.json()) == (200, {})
    (found,) = await spans(house.store, "rollout-0")
    assert (found.trace_id, found.parent_id, found.service) == ("a" * 32, "b" * 16, "shop")
    assert (found.started_at, found.ended_at, found.kind, found.status) == (1.5, 2.5, "server", "unset")


async def test_a_known_trace_says_more_than_the_key_of_the_request(house, post) -> None:
    one, two = await house.llm(), await house.llm()
    both = request(span(trace_id_of(one.api_key)), span(trace_id_of(two.api_key)))
    assert (await post(both, authorization=f"Bearer {two.api_key}")).json() == {}
    assert [len(await spans(house.store, f"rollout-{number}")) for number in (0, 1)] == [1, 1]


async def test_spans_of_nobody_are_counted_and_kept_nowhere(house, post) -> None:
    llm = await house.llm()
    expired = house.gateway.issue("rollout-0", 1, ttl=0.0)
    known = trace_id_of(llm.api_key)
    sent = [
        span(known, 1),
        span("c" * 32, 2),
        span(trace_id_of(expired), 3),
        span(known, 0),
        span(known[:30], 4),
        span(known, 5, parentSpanId="xyz"),
    ]
    reply = await post(request(*sent))
    partial = reply.json()["partialSuccess"]
    assert (reply.status_code, partial["rejectedSpans"]) == (200, "5")
    assert partial["errorMessage"].startswith("5 of 6 spans were not kept. A span belongs to a rollout by its trace id")
    assert [found.span_id for found in await spans(house.store, "rollout-0")] == [f"{1:016x}"]


async def test_without_a_token_the_store_is_asked_for_few_traces(house, post, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, asked = await house.llm(), []
    find = TraceBook.find

    async def finding(book, ids):
        asked.append(set(ids))
        return await find(book, asked[-1])

    monkeypatch.setattr(TraceBook, "find", finding)
    known = trace_id_of(llm.api_key)
    spans = request(*(span(f"{number:032x}", number) for number in range(1, 200)), span(known, 500))
    assert (await post(spans)).json()["partialSuccess"]["rejectedSpans"] == "199"
    assert (await post(spans, authorization=f"Bearer {llm.api_key}")).status_code == 200
    assert [len(ids) for ids in asked] == [65, 200]
    assert known in asked[0]


async def test_who_sends_no_token_can_bring_little(house, post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_endpoint, "ANONYMOUS_SPANS", 2000)
    llm = await house.llm()
    key = {"authorization": f"Bearer {llm.api_key}"}
    long = request(*(span("a" * 32, number, name="x" * 1000) for number in range(1, 1200)))
    many = request(*[{}] * (span_endpoint.ANONYMOUS_SPANS + 1))
    for body, status in ((long, 413), (many, 400)):
        for sent, headers in ((body, {}), (gzip.compress(body), {"content_encoding": "gzip"})):
            reply = await post(sent, **headers)
            assert (reply.status_code, "send fewer" in reply.json()["message"]) == (status, True), reply.text
            assert (await post(sent, **headers, **key)).status_code == 200
    assert len(await spans(house.store, "rollout-0")) == 1199


async def test_a_request_may_have_more_values_than_a_call(build) -> None:
    house = await build(limits={"json_values": 1000})
    http = await house.http()
    for values, status in ((3000, 200), (5000, 413)):
        body = request(span("a" * 32, many=[1] * values))
        assert (await http.post("/traces", content=body, headers={"content-type": JSON})).status_code == status


async def test_what_is_kept_of_nobody_is_not_looked_at(house, post, monkeypatch: pytest.MonkeyPatch) -> None:
    """To take credentials out of texts is most of the work."""
    llm, looked = await house.llm(), []
    redacted = span_endpoint.redacted_span
    monkeypatch.setattr(span_endpoint, "redacted_span", lambda one: looked.append(one.name) or redacted(one))
    body = request(*(span("c" * 32, number, name="nobody's") for number in range(1, 50)))
    assert (await post(body)).json()["partialSuccess"]["rejectedSpans"] == "49"
    secret = "Bearer " + "s" * 40
    await post(request(span("c" * 32, 1, name="nobody's"), span(trace_id_of(llm.api_key), 2, name=secret)))
    assert looked == [secret]
    (kept,) = await spans(house.store, "rollout-0")
    assert "sss" not in kept.name


async def test_few_requests_without_a_token_are_read_at_a_time(house, post, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    llm, go, reading = await house.llm(), threading.Event(), threading.Semaphore(0)
    read = span_endpoint._read

    def slowly(*arguments):
        reading.release()
        assert go.wait(20)
        return read(*arguments)

    monkeypatch.setattr(span_endpoint, "_read", slowly)
    known = request(span(trace_id_of(llm.api_key)))
    held = [asyncio.create_task(post(known)) for _ in range(span_endpoint.ANONYMOUS_AT_ONCE)]
    for _ in held:
        await house.until(lambda: reading.acquire(blocking=False))
    refused = await post(known)
    said = refused.json()
    assert (refused.status_code, refused.headers["retry-after"], said["code"]) == (429, "1", 8)
    assert "send the rollout's API key" in said["message"]
    with_key = asyncio.create_task(post(request(span("a" * 32, 2)), authorization=f"Bearer {llm.api_key}"))
    await house.until(lambda: reading.acquire(blocking=False))
    go.set()
    assert [reply.status_code for reply in await asyncio.gather(*held, with_key)] == [200] * (len(held) + 1)
    assert (await post(known)).status_code == 200


async def test_rejected_spans_are_said_in_protobuf_too(house, post) -> None:
    llm = await house.llm()
    exporter = InMemorySpanExporter()
    work(llm, sdk(llm, exporter))
    body = encode_spans(exporter.get_finished_spans()).SerializeToString()
    await house.store.complete("rollout-0", 1, Outcome(fault=Fault.INFRASTRUCTURE))
    await house.store.lease("run", "worker")
    reply = await post(body, content_type=PROTOBUF)
    said = ExportTraceServiceResponse.FromString(reply.content).partial_success
    assert (reply.status_code, reply.headers["content-type"], said.rejected_spans) == (200, PROTOBUF, 2)
    assert "must be its latest" in said.error_message
    assert await spans(house.store, "rollout-0", 1) == []


async def test_gzip_is_read_and_a_bomb_is_not(build, house, post) -> None:
    llm = await house.llm()
    body = request(span(trace_id_of(llm.api_key)))
    packed = gzip.compress(body)
    assert (await post(packed, content_encoding="gzip")).status_code == 200
    assert len(await spans(house.store, "rollout-0")) == 1
    bomb = zlib.compressobj(wbits=31)
    blown = bomb.compress(b" " * (33 << 20)) + bomb.flush()
    key = {"authorization": f"Bearer {llm.api_key}"}
    for broken, headers, status, text in (
        (body, {}, 400, "not gzip, as its header content-encoding says"),
        (packed[:-4], {}, 400, "cut off"),
        (blown, key, 413, "raise gateway.max_body_bytes"),
        (blown, {}, 413, "send fewer spans at a time, or send the rollout's API key with the spans"),
    ):
        reply = await post(broken, content_encoding="gzip", **headers)
        assert (reply.status_code, text in reply.json()["message"]) == (status, True), reply.text


BAD = {
    "no JSON": (b"{", "is not JSON"),
    "a list": (b"[]", "must be an object with resourceSpans"),
    "another request": (b'{"resourceLogs": []}', "must be an object with resourceSpans"),
    "a wrong list": (b'{"resourceSpans": {}}', "resourceSpans must be a list of objects"),
    "a wrong item": (b'{"resourceSpans": [1]}', "resourceSpans must be a list of objects"),
    "a wrong object": (b'{"resourceSpans": [{"resource": 5}]}', "resource is 5: it must be an object"),
    "a name": (request(span("a" * 32, name=5)), "name is 5: it must be a string"),
    "a time": (request(span("a" * 32, startTimeUnixNano="soon")), "startTimeUnixNano is 'soon': it must be a whole"),
    "a huge time": (request(span("a" * 32, endTimeUnixNano=str(2**70))), "endTimeUnixNano is"),
    "a kind": (request(span("a" * 32, kind=True)), "kind is True"),
    "a double": (
        request(span("a" * 32, attributes=[{"key": "a", "value": {"doubleValue": []}}])),
        "doubleValue is []: it must be a number",
    ),
    "bytes": (request(span("a" * 32, attributes=[{"key": "a", "value": {"bytesValue": "?"}}])), "not base64"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_read_is_named(house, post, name: str) -> None:
    body, message = BAD[name]
    reply = await post(body)
    said = reply.json()
    assert (reply.status_code, said["code"]) == (400, 3)
    assert message in said["message"]


async def test_errors_are_a_status_in_the_encoding_of_the_request(house, post) -> None:
    reply = await post(b"\xff\xff", content_type=PROTOBUF)
    assert (reply.status_code, reply.headers["content-type"]) == (400, PROTOBUF)
    from google.rpc.status_pb2 import Status

    status = Status.FromString(reply.content)
    assert (status.code, "not an ExportTraceServiceRequest in protobuf" in status.message) == (3, True)
    for headers, code in (
        ({"content_type": "text/plain"}, 415),
        ({"content_encoding": "br"}, 415),
        ({"authorization": "Bearer nonsense"}, 401),
    ):
        reply = await post(b"{}", **headers)
        assert reply.status_code == code
        assert reply.json()["message"]
    assert (await post(b"x" * (33 << 20))).status_code == 413


async def test_without_the_extra_json_is_still_read(house, post, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.collector.trace.v1.trace_service_pb2", None)
    reply = await post(b"", content_type=PROTOBUF)
    assert reply.status_code == 501
    assert b"extra 'otel'" in reply.content
    assert b"pip" not in reply.content  # whose command has the path of a checkout
    llm = await house.llm()
    assert (await post(request(span(trace_id_of(llm.api_key))))).json() == {}
    assert len(await spans(house.store, "rollout-0")) == 1


async def test_a_store_that_refuses_is_asked_again(build) -> None:
    class Full(MemoryStore):
        async def call(self, operation, arguments):
            if operation.name == "append_spans":
                raise StoreError("the disk is full")
            return await super().call(operation, arguments)

    house = await build(store=Full())
    llm = await house.llm()
    async with httpx.AsyncClient() as client:
        reply = await client.post(
            f"{llm.base_url}/traces",
            content=request(span(trace_id_of(llm.api_key))),
            headers={"content-type": "application/json; charset=utf-8"},
        )
    assert (reply.status_code, reply.headers["retry-after"], reply.json()["code"]) == (503, "1", 14)
    assert "the disk is full" in reply.json()["message"]


def told(signer: TokenSigner) -> TraceBook:
    """The book of a gateway whose keys are the signer's."""
    book = TraceBook(MemoryStore(), shared=False)
    signer.watchers.append(book.note_key)
    return book


def test_traces_are_known_while_their_token_is_valid() -> None:
    signer, restarted = TokenSigner(b"s" * 32), TokenSigner(b"s" * 32)
    book, book_of_restarted = told(signer), told(restarted)
    token = signer.issue("r", 2, ttl=100)
    trace = trace_id_of(token)
    assert (book.known(trace).rollout, book.known(trace).attempt) == ("r", 2)  # type: ignore[union-attr]
    assert book_of_restarted.known(trace) is None
    restarted.verify(token)
    assert book_of_restarted.known(trace) is not None
    for number in range(5):
        signer.issue(f"old-{number}", 1, ttl=-1)
    assert book.known(trace_id_of(signer.issue("old", 1, ttl=-1))) is None
    assert book.known(trace) is not None


def test_no_more_traces_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(trace_book, "TRACES", 2)
    book = told(signer := TokenSigner(b"s" * 32))
    traces = [trace_id_of(signer.issue(f"r{number}", 1, ttl=100)) for number in range(3)]
    assert [book.known(trace) is not None for trace in traces] == [False, True, True]


@pytest.mark.parametrize("sign_of_life", ["spans", "call"])
def test_the_trace_of_an_agent_that_is_heard_of_outlasts_newer_ones(
    monkeypatch: pytest.MonkeyPatch, sign_of_life: str
) -> None:

    monkeypatch.setattr(trace_book, "TRACES", 3)
    monkeypatch.setattr(identity, "CACHE_SIZE", 1)
    book = told(signer := TokenSigner(b"s" * 32))
    slow = signer.issue("slow", 1, ttl=100)
    for number in range(10):
        signer.verify(signer.issue(f"quick-{number}", 1, ttl=100))
        if sign_of_life == "call":
            assert signer.verify(slow).rollout == "slow"
        else:
            assert book.known(trace_id_of(slow)) is not None
    assert book.known(trace_id_of(slow)) is not None


def test_the_route_is_there_in_a_process_without_opentelemetry() -> None:
    """Neither the adapter nor the API of OpenTelemetry is imported for it, and before a gateway is made not even the route."""
    program = """
import sys
sys.modules["opentelemetry"] = None
from lightning.plugins import plugins
infos = {info.name: info.state for info in plugins().plugins()}
assert (infos["otel"], infos["otel-traces"]) == ("waiting", "loaded")
assert "traces" in plugins().names("routes") and "lightning_otel.adapter" not in sys.modules
from lightning.config import GatewayConfig
from lightning.gateway import Gateway
from lightning.store.memory import MemoryStore
gateway = Gateway(MemoryStore(), [], GatewayConfig(), secret=b"s" * 32)
assert "/v1/traces" in {route.path for route in gateway.app.routes}
"""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_gateway_without_the_plugin_says_what_there_is() -> None:
    program = """
import asyncio, httpx
from lightning.config import GatewayConfig
from lightning.gateway import Gateway
from lightning.store.memory import MemoryStore

async def main():
    gateway = Gateway(MemoryStore(), [], GatewayConfig(), secret=b"s" * 32)
    await gateway.start()
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{gateway.url}/v1/traces", content=b"{}")
    await gateway.close()
    said = reply.json()["error"]
    assert (reply.status_code, said["code"]) == (404, "unknown_route"), reply.text
    assert "There is no POST /v1/traces here. These exist: POST /v1/chat/completions" in said["message"], said
    assert "POST /v1/traces," not in said["message"], said

asyncio.run(main())
"""
    environment = {**os.environ, "LIGHTNING_DISABLE_PLUGINS": "otel-traces"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")

"""An agent in one process, a tool service in another that knows only a `traceparent`, and what the trainer learns of both."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from lightning.config import GatewayConfig, RunnerConfig
from lightning.gateway import Gateway, Upstream
from lightning.instrument.context import root_span_id
from lightning.runner.lease_loop import work
from lightning.runner.process import ProcessRunner
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM
from lightning.trainer.training_data import load_groups, rollout_digest
from lightning.types import LLM, Caller, Rollout, Run, Status, Task
from lightning_otel.traces.store import append_spans, spans

SERVICE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

provider = TracerProvider(resource=Resource.create({"service.name": "shop"}))
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=sys.argv[1])))
tracer = provider.get_tracer("shop")

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "price",
                      "gen_ai.tool.call.id": asked["call_id"]}
        with tracer.start_as_current_span("execute_tool price", propagate.extract(self.headers), attributes=attributes) as span:
            if asked["item"] == 1:
                span.set_status(trace.StatusCode.ERROR, "no such item")
            agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "clerk"}
            with tracer.start_as_current_span("invoke_agent clerk", attributes=agent):
                said = {"gen_ai.operation.name": "chat", "gen_ai.response.id": asked["response"]}
                tracer.start_span("chat policy", attributes=said).end()
        self.send_response(204)
        self.end_headers()
    def log_message(self, *args): pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def agent(task: Task, llm: LLM) -> float:
    """Its HTTP client is not one the tap sees; its user propagates the trace as with any instrumented client."""
    from opentelemetry import propagate

    def post(url: str, body: object, **headers: str) -> bytes:
        data = json.dumps(body).encode()
        with urlopen(Request(url, data, {"content-type": "application/json", **headers})) as reply:
            return bytes(reply.read())

    messages = [{"role": "user", "content": "hello"}]
    key = {"authorization": f"Bearer {llm.api_key}"}
    reply = json.loads(post(f"{llm.base_url}/chat/completions", {"model": llm.model, "messages": messages}, **key))
    context: dict[str, str] = {}
    propagate.inject(context)
    asked = {"item": task.input["item"], "response": reply["id"], "call_id": f"call_{task.input['item']}"}  # type: ignore[index,call-overload]
    post(str(task.input["shop"]), asked, **context)  # type: ignore[index,call-overload]
    return 1.0


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[object]:
    """`shop(gateway url)` starts the service and gives its address."""
    started: list[subprocess.Popen[str]] = []
    script = tmp_path / "shop.py"
    script.write_text(textwrap.dedent(SERVICE))

    def start(url: str) -> str:
        command = [sys.executable, str(script), f"{url}/v1/traces"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
async def test_a_service_joins_the_rollout_by_its_traceparent(shop) -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    config = RunnerConfig(concurrency=2, timeout=60, adapters=())
    async with FakeVLLM() as policy:
        gateway = Gateway(store, [Upstream(policy.url, policy.model)], GatewayConfig(), secret=b"s" * 32)
        await gateway.start()
        address = shop(gateway.url)
        tasks = [Task({"item": item, "shop": address}) for item in range(3)]
        await store.create_rollouts(
            [Rollout(f"r{item}", "run", task, "g", index=item) for item, task in enumerate(tasks)]
        )
        runner = ProcessRunner(agent, config)
        await runner.start()
        try:
            await work(store, runner, "run", gateway.llm, worker="w", config=config, line=gateway.parts.line)
        finally:
            await runner.close()
            await gateway.close()

    rollouts = (await store.list_rollouts("run")).items
    assert [(rollout.status, rollout.error) for rollout in rollouts] == [(Status.SUCCEEDED, "")] * 3
    for item, rollout in enumerate(rollouts):
        tool, clerk, chat = await spans(store, rollout.id)
        assert (tool.parent_id, clerk.parent_id, chat.parent_id) == (
            root_span_id(tool.trace_id),
            tool.span_id,
            clerk.span_id,
        )
        (event,) = list((await store.attempts_of([(rollout.id, None)]))[0].tool_events)
        failed = item == 1
        assert (event.name, event.call_id, event.status) == ("price", f"call_{item}", "error" if failed else "ok")
        assert (event.error, event.at) == ("no such item" if failed else "", tool.ended_at)
        (call,) = await store.transitions(rollout.id)
        assert call.caller == Caller("clerk", ("price", "clerk"), chat.span_id, clerk.span_id, "otel")

    before = await load_groups(store, rollouts, ["clerk"])
    for rollout in rollouts:
        tool, _, chat = await spans(store, rollout.id)
        late = replace(tool, span_id="e" * 16, attributes={**tool.attributes, "gen_ai.tool.call.id": "late"})
        named = replace(
            chat, span_id="d" * 16, parent_id="", attributes={**chat.attributes, "gen_ai.agent.name": "late"}
        )
        assert await append_spans(store, [late, named]) == 2
    after = await load_groups(store, rollouts, ["clerk"])
    digests = [[rollout_digest(member) for member in group.trajectories] for group in (*before, *after)]
    assert digests[0] == digests[1]
    assert [member.trainable for member in after[0].trajectories] == [(True,)] * 3
    await store.close()

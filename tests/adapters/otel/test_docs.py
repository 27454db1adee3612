"""The shell lines of docs/tracing.md do what the page says."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

from lightning.config import GatewayConfig
from lightning.gateway import Gateway, Upstream
from lightning.instrument import activate
from lightning.store.memory import MemoryStore
from lightning.types import Outcome, Rollout, Run, Task
from lightning_otel.traces.derive import with_spans
from lightning_otel.traces.store import spans

PAGE = Path(__file__).parents[3] / "docs" / "tracing.md"
BLOCK = re.compile(r"<!-- run by tests/adapters/otel/test_docs.py -->\n```sh\n(.*?)```", re.DOTALL)


async def test_a_shell_reports_a_tool() -> None:
    (script,) = BLOCK.findall(PAGE.read_text())
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", Task("q"), "g")])
    (lease,) = await store.lease("run", "w")
    gateway = Gateway(store, [Upstream("http://127.0.0.1:9", "m")], GatewayConfig(), secret=b"s" * 32)
    await gateway.start()
    try:
        with activate(gateway.llm(lease)) as session:
            variables = {"GATEWAY": gateway.url, "TRACEPARENT": session.traceparent}
        shell = await asyncio.create_subprocess_exec(
            "sh", "-euc", script, env={**os.environ, **variables}, stdout=-1, stderr=-1
        )
        out, err = await shell.communicate()
        assert (shell.returncode, out, err) == (0, b"{}", b"")
    finally:
        await gateway.close()
    (event,) = with_spans(Outcome(reward=1.0), await spans(store, "r"), []).tool_events
    assert (event.name, event.status, event.error, event.call_id) == ("price", "error", "no such item", "call_1")
    (span,) = await spans(store, "r")
    assert (span.service, span.parent_id) == ("shop", session.traceparent.split("-")[2])
    await store.close()

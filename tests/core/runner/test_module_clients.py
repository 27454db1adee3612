"""Clients that an agent's module makes at its import call the rollout's policy; what is not the policy's goes elsewhere."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.config import RunnerConfig
from lightning.runner.process import ProcessRunner
from lightning.testing.chat_server import ChatServer
from lightning.types import Lease, Rollout, Task

AGENT = """
import anthropic, openai

plain, azure = openai.OpenAI(max_retries=0), None
asynchronous = openai.AsyncOpenAI(max_retries=0)
claude = anthropic.Anthropic(max_retries=0)
try:
    azure = openai.AzureOpenAI(api_version="2024-10-21", max_retries=0)
except openai.OpenAIError:
    pass
HI = [{"role": "user", "content": "hi"}]

async def agent(task, llm):
    if task.input == "chat":
        plain.chat.completions.create(model="gpt-5", messages=HI)
        await asynchronous.chat.completions.create(model="gpt-5", messages=HI)
    if task.input == "azure":
        azure.chat.completions.create(model="my-deployment", messages=HI)
    if task.input == "azure-embed":
        azure.embeddings.with_raw_response.create(model="e", input="text", encoding_format="float")
    if task.input == "claude":
        claude.messages.with_raw_response.create(model="claude", max_tokens=5, messages=HI)
    if task.input == "embed":
        inside = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0)
        for client in (plain, inside):
            client.embeddings.with_raw_response.create(model="e", input="text", encoding_format="float")
    return 1.0
"""


@pytest.fixture
def servers() -> Iterator[tuple[ChatServer, ChatServer]]:
    with ChatServer() as gateway, ChatServer() as provider:
        yield gateway, provider


@pytest.mark.parametrize("real_key", [False, True])
async def test_their_calls_are_the_rollouts_and_no_others(
    servers: tuple[ChatServer, ChatServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_key: bool
) -> None:
    """The module is imported here as well, as a trainer does it: with keys, or it could not."""
    gateway, provider = servers
    (tmp_path / "their_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with monkeypatch.context() as patched:
        patched.setenv("OPENAI_API_KEY", "sk-trainer")
        patched.setenv("ANTHROPIC_API_KEY", "sk-trainer")
        module = importlib.import_module("their_agent")
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", provider.llm("x").base_url)
    monkeypatch.setenv("OPENAI_BASE_URL", provider.llm("x").base_url)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AZURE_OPENAI_API_KEY"):
        monkeypatch.setenv(name, "sk-real") if real_key else monkeypatch.delenv(name, raising=False)
    runner = ProcessRunner(module.agent, RunnerConfig(concurrency=1, timeout=60))
    await runner.start()
    try:
        for what in ("chat", "azure", "claude", "embed", "azure-embed"):
            lease = Lease(Rollout(what, "run", Task(what), "g", attempt=1), "w", 0.0)
            assert (await runner.run(lease, gateway.llm(f"key-{what}"))).error == ""
    finally:
        await runner.close()
        sys.modules.pop("their_agent", None)
    calls = [(call.path.partition("?")[0], call.key or call.headers["x-api-key"]) for call in gateway.calls]
    assert calls[:4] == [
        ("/v1/chat/completions", "key-chat"),
        ("/v1/chat/completions", "key-chat"),
        ("/v1/chat/completions", "key-azure"),
        ("/v1/messages", "key-claude"),
    ]
    assert all("sk-real" not in json.dumps(dict(call.headers)) for call in gateway.calls), (
        "nobody sees the process's key"
    )
    if not real_key:
        embeddings = [("/v1/embeddings", key) for key in ("key-embed", "key-embed", "key-azure-embed")]
        assert calls[4:] == embeddings, "the gateway knows more providers, or says what is missing"
        assert not provider.calls
        return
    assert calls[4:] == []
    plain, inside, azure = provider.calls
    assert [(call.path, call.key) for call in (plain, inside)] == [("/v1/embeddings", "sk-real")] * 2
    assert azure.path == "/v1/openai/deployments/e/embeddings?api-version=2024-10-21"
    assert (azure.headers["api-key"], azure.key) == ("sk-real", "")
    assert all("-embed" not in json.dumps([dict(call.headers), dict(call.body)]) for call in provider.calls)

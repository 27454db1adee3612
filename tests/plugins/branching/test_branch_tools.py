"""Which tools are answered in a branch is the gateway's to say; an agent is not run before it has."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from lightning.plugins.stages import NamedStage
from lightning.runner.stages import AttemptLine
from lightning.runner.worker import run_agent
from lightning.types import LLM, Fault, Outcome, Task
from lightning_branching import tools


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[tuple[int, bytes]], LLM]]:
    """What a gateway says, one after the other, and the model of a branch behind it."""
    monkeypatch.setattr(tools, "PAUSE", 0.01)
    said: list[tuple[int, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = said.pop(0)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, *_: object) -> None:
            """No lines in a test's output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield said, LLM(f"http://127.0.0.1:{server.server_port}/v1", "key", "policy", extras={tools.BRANCHES: True})
    server.shutdown()
    thread.join()
    server.server_close()


def run(llm: LLM) -> tuple[Outcome, int]:
    ran = itertools.count()

    def agent(task: Task, llm: LLM) -> float:
        next(ran)
        return 1.0

    line = AttemptLine([NamedStage(tools.BRANCHES, tools.BranchToolsStage())])
    with asyncio.Runner() as loop:
        outcome = run_agent(agent, Task("q"), llm, loop, line)
    return outcome, next(ran)


def test_a_gateway_that_cannot_say_is_asked_again(answers: tuple[list[tuple[int, bytes]], LLM]) -> None:
    said, llm = answers
    said += [(503, b'{"error": {"message": "Send the call again."}}'), (200, b'{"tool_runs": []}')]
    outcome, ran = run(llm)
    assert (outcome.reward, ran, said) == (1.0, 1, [])


def test_one_that_never_says_is_no_fault_of_the_agent(answers: tuple[list[tuple[int, bytes]], LLM]) -> None:
    said, llm = answers
    said += [(503, b"busy")] * tools.TRIES
    outcome, ran = run(llm)
    assert (outcome.fault, outcome.error, ran) == (Fault.INFRASTRUCTURE, "busy", 0)


def test_a_branch_that_is_none_ends_with_why(answers: tuple[list[tuple[int, bytes]], LLM]) -> None:
    said, llm = answers
    said.append((409, b'{"error": {"message": "This branch is void: there is no such call"}}'))
    outcome, ran = run(llm)
    assert (outcome.fault, outcome.error, ran) == (Fault.AGENT, "This branch is void: there is no such call", 0)

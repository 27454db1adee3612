"""The agent of `lightning demo tiny`, which writes down what it was answered and what it returned.

The invariant: a line is in the journal only when the agent has the whole reply, or is about to return the reward; so what the
journal has and the store has not was lost.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import time
from typing import TYPE_CHECKING, Any

import openai
from lightning_examples.raw_python import agent as math
from lightning_examples.word_problems import tasks as word_problems

if TYPE_CHECKING:
    from lightning import LLM, Task

tasks = word_problems(400, 0)


def agent(task: Task, llm: LLM) -> float:
    """Solve the task as the demonstration does."""
    math._client = _client
    reward = math.agent(task, llm)
    write(token=llm.api_key, url=llm.base_url, reward=reward)
    return reward


def write(*, token: str, url: str, **what: Any) -> None:
    """Append a line, in one write, so that those of other processes are never mixed in."""
    claims = token.split(".")[1]
    said = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    line = {
        "at": time.time(),
        "runner": os.environ["CHAOS_RUNNER"],
        "url": url,
        "rollout": said["sub"],
        "attempt": said["att"],
    }
    with open(os.environ["CHAOS_JOURNAL"], "ab", buffering=0) as journal:  # noqa: PTH123 — unbuffered
        journal.write(json.dumps({**line, **what}).encode() + b"\n")


def _noted(response: Any) -> None:
    response.read()
    if response.status_code == 200:
        token = response.request.headers["authorization"].removeprefix("Bearer ")
        write(token=token, url=str(response.request.url.copy_with(path="")), reply=response.json()["id"])


@functools.cache
def _client(base_url: str) -> openai.OpenAI:
    client = openai.DefaultHttpxClient(event_hooks={"response": [_noted]}, timeout=120)
    return openai.OpenAI(base_url=base_url, api_key="set per call", http_client=client, max_retries=4)

"""What the logprobs of one long answer cost: vLLM's API process and the gateway's loop, as OpenAI's JSON and packed.

No model runs: vLLM's own classes are given the engine's rows one token at a time, as its steps bring them, and make the whole
answer of a chat call that asked for ids and `logprobs: true, top_logprobs: 0`; the gateway's own functions read that answer,
take out what the agent did not ask for, and write it. Everything in one process, CPU seconds of it, the best of several turns.

    python tests/bench/bench_logprobs.py [--tokens 16384] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
from fastapi.responses import JSONResponse
from lightning.gateway.dialects import Capture, Chat
from lightning.gateway.http import write_object
from lightning.policy_server import packed_logprobs as packed
from lightning.testing.tiny_models import make_tiny_model
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    UsageInfo,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

TURNS = 5


def answer(tokenizer: Any, ids: list[int], rows: list[LogprobsLists]) -> bytes:
    """What vLLM's API process does for the logprobs of an answer that is not streamed, and its body."""
    request = SimpleNamespace(sampling_params=SamplingParams(logprobs=0))
    processor = LogprobsProcessor.from_new_request(tokenizer, request)  # type: ignore[arg-type]
    for row in rows:
        processor._update_sample_logprobs(row)
    serving = OpenAIServingChat.__new__(OpenAIServingChat)
    serving.return_tokens_as_token_ids = False
    said = serving._create_chat_logprobs(
        token_ids=ids,
        top_logprobs=processor.logprobs,
        num_output_top_logprobs=0,
        logprob_token_ids=None,
        tokenizer=tokenizer,
        return_as_token_id=None,
    )
    message = ChatMessage(role="assistant", content=tokenizer.decode(ids))
    choice = ChatCompletionResponseChoice(
        index=0, message=message, logprobs=said, finish_reason="length", token_ids=ids
    )
    usage = UsageInfo(prompt_tokens=1, completion_tokens=len(ids), total_tokens=len(ids) + 1)
    whole = ChatCompletionResponse(model="m", choices=[choice], usage=usage, prompt_token_ids=[1])
    return bytes(JSONResponse(content=whole.model_dump()).body)


def read(body: bytes) -> list[float]:
    """What the gateway does with it; the logprobs that it records."""
    dialect, capture = Chat(), Capture("x")
    plan = dialect.plan({"messages": [{"role": "user", "content": "x"}]})
    reply = orjson.loads(body)
    dialect.read(reply, capture)
    dialect.strip(reply, plan)
    write_object(reply)
    return list(capture.choices[0].logprobs)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds, the best of some turns."""
    found = []
    for _ in range(TURNS):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def main(tokens: int, out: Path | None) -> None:
    """Measure, print a table, and write the numbers to `out`."""
    packed.install()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(Path(folder) / "model"))
    text = tokenizer.encode("The answer to the question is 42, as everybody knows. ")
    ids = (text * (tokens // len(text) + 1))[:tokens]
    numbers = -rng.exponential(size=tokens).astype(np.float32)
    rows = [
        LogprobsLists(np.array([[token]]), np.array([[number]]), np.array([1]))
        for token, number in zip(ids, numbers, strict=True)
    ]
    results: dict[str, dict[str, float]] = {}
    recorded = {}
    for name, wanted in (("json", False), ("packed", True)):
        token = packed._wanted.set(wanted)
        body = answer(tokenizer, ids, rows)
        recorded[name] = read(body)
        vllm, gateway = seconds(lambda: answer(tokenizer, ids, rows)), seconds(lambda body=body: read(body))
        results[name] = {"vllm_ms": vllm * 1e3, "gateway_ms": gateway * 1e3, "body_bytes": float(len(body))}
        packed._wanted.reset(token)
    assert recorded["json"] == recorded["packed"] == numbers.tolist(), "the numbers are not the same"
    lines = [f"{f'one answer of {tokens} tokens':<34}{'JSON':>12}{'packed':>12}"]
    for key, title in (("vllm_ms", "vLLM's API process, ms"), ("gateway_ms", "gateway, ms"), ("body_bytes", "bytes")):
        lines.append(f"{title:<34}" + "".join(f"{results[name][key]:>12.1f}" for name in results))
    sys.stdout.write("\n".join(lines) + "\n")
    if out is not None:
        out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    main(arguments.tokens, arguments.json)

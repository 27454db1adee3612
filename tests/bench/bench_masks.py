"""What sampling masks cost, and what they are worth: calls with and without them, side by side, to one vLLM of a real model.

For each sampler the same requests are sent in turns with the header that asks for masks and without it. Printed are the ratio
of vLLM's CPU seconds, the bytes of masks that are stored for a token, and the largest gap between the logprobs of the trainer,
in float32, and of the sampler. `none` are calls without a mask, to a vLLM with the plugin's part and to one without.

    python tests/bench/bench_masks.py [--model FOLDER] [--calls 32] [--tokens 48] [--passes 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
from lightning.batch import Trajectory, build_samples
from lightning.config.sections import PolicyServerConfig
from lightning.engines.protocol import OptimizerConfig
from lightning.engines.torch.engine import TorchEngine
from lightning.policy_server import vllm_server
from lightning.policy_server.packed_logprobs import BESIDE, FIELD, IDS_HEADER, unpack, unpack_ids
from lightning.policy_server.packed_logprobs import HEADER as PACKED
from lightning.policy_server.packed_logprobs import WANTED as YES
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning.types import Rollout, Task, Transition, logprobs, token_ids
from lightning_masks.codes import HEADER, NAME, WANTED
from lightning_masks.extra import written
from lightning_masks.stage import bias_of
from lightning_masks.texts import joined

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.5": {"top_p": 0.5},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
    "bad_words": {"bad_words": [" the", " a", " number"]},
    "logit_bias": {"logit_bias": {"339": 3.0, "198": -5.0, "28": -100.0}},
    "choice": {"structured_outputs": {"choice": ["a first answer", "a second answer"]}},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
    "regex": {"structured_outputs": {"regex": "[A-Z][a-z ]{20,60}\\."}},
}
ASKED = [{"role": "user", "content": "Tell me about the number 42, and who likes it."}]


def cpu_seconds(group: int) -> float:
    """Of all processes of a process group."""
    total = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            said = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(said[2]) == group:
            total += int(said[11]) + int(said[12])
    return total / os.sysconf("SC_CLK_TCK")


async def send(
    vllm: OwnedVLLM, asked: Mapping[str, Any], calls: int, tokens: int, *, masks: bool
) -> tuple[float, float, list[Any]]:
    """Send the calls at once; return wall and vLLM's CPU seconds, and the answers."""
    headers = {PACKED: YES, IDS_HEADER: YES} | ({HEADER: WANTED} if masks else {})
    body = {"model": vllm.model, "messages": ASKED, "max_tokens": tokens, "return_token_ids": True, "logprobs": True}
    async with httpx.AsyncClient(base_url=vllm.url, headers=headers, timeout=600, limits=httpx.Limits()) as http:
        began, used = time.perf_counter(), cpu_seconds(vllm.pid or 0)
        wanted = [{**body, "top_logprobs": 0, "seed": number, **asked} for number in range(calls)]
        replies = await asyncio.gather(*(http.post("/v1/chat/completions", json=each) for each in wanted))
        wall, cpu = time.perf_counter() - began, cpu_seconds(vllm.pid or 0) - used
    return wall, cpu, [reply.raise_for_status().json() for reply in replies]


def recorded(answers: Sequence[Any], asked: Mapping[str, Any]) -> list[Transition]:
    """The answers as calls with masks, each of a rollout of its own."""
    found = []
    for place, answer in enumerate(answers):
        choice = answer["choices"][0]
        ids, said = choice["token_ids"], choice["logprobs"]
        known = joined([said[BESIDE][NAME]])
        assert known is not None, "more masks than vLLM sends"
        extra = written(*known, bias_of(dict(asked)) or {})
        prompt, response = token_ids(unpack_ids(answer["prompt_token_ids"])), token_ids(ids)
        call = Transition(
            f"r{place}",
            0,
            0,
            str(place),
            prompt,
            response,
            logprobs(unpack(said[FIELD])),
            constrained=True,
            extras={NAME: extra},
        )
        found.append(call)
    return found


def largest_gap(engine: TorchEngine, calls: Sequence[Transition]) -> float:
    """|trainer - sampler|."""
    members = [Trajectory(Rollout(call.rollout, "run", Task(0), "g", attempt=0), (call,), (True,)) for call in calls]
    rows = build_samples(members, [[1.0]] * len(calls))
    gaps = [
        abs(own - row.logprobs)[row.weights != 0].max() for own, row in zip(engine.logprobs(rows), rows, strict=True)
    ]
    return float(np.max(gaps))


async def measure(model: Path, folder: Path, calls: int, tokens: int, passes: int) -> dict[str, dict[str, float]]:
    """The numbers of each sampler."""
    config = PolicyServerConfig(device="cpu", dtype="float32", max_model_len=1024)
    vllm, bare = (OwnedVLLM(model, config, log=folder / f"{name}.log") for name in ("with", "without"))
    await vllm.start()
    with patch.object(vllm_server, "server_parts", list):
        await bare.start()
    engine = TorchEngine(device="cpu", dtype="float32")
    engine.open(model, OptimizerConfig(), seed=0)
    found: dict[str, dict[str, float]] = {}
    try:
        for name, asked in SAMPLERS.items():
            other = vllm if asked else bare
            for server in {id(vllm): vllm, id(other): other}.values():
                await send(server, asked, calls, 4, masks=bool(asked))
            times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            answers: list[Any] = []
            for _ in range(passes):
                for masks in (False, True):
                    server = vllm if masks else other
                    wall, cpu, own = await send(server, asked, calls, tokens, masks=masks and bool(asked))
                    times[masks].append((wall, cpu))
                    answers = own if masks else answers
            best = {
                masks: [statistics.median(each[part] for each in times[masks]) for part in (0, 1)] for masks in times
            }
            row = {"wall": best[True][0] / best[False][0], "cpu": best[True][1] / best[False][1]}
            if asked:
                known = recorded(answers, asked)
                size = sum(len(call.extras[NAME]) for call in known)
                row |= {
                    "bytes": size / sum(len(call.response_ids) for call in known),
                    "gap": largest_gap(engine, known),
                }
            found[name] = row
            sys.stdout.write(line(name, row))
            sys.stdout.flush()
    finally:
        engine.close()
        await vllm.close()
        await bare.close()
    return found


def line(name: str, row: Mapping[str, float]) -> str:
    """One line of the table."""
    rest = f", {row['bytes']:7.1f} bytes a token, gap {row['gap']:.1e}" if "bytes" in row else ""
    return f"{name:12} with / without: {row['cpu']:.2f} of the CPU time, {row['wall']:.2f} of the time{rest}\n"


def main() -> None:
    """Print a line for each sampler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder; by default SmolLM2-135M")
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if (model := asked.model) is None:
        from lightning_examples.smollm2 import model_folder

        model = model_folder()
    with tempfile.TemporaryDirectory() as made:
        found = asyncio.run(measure(model, Path(made), asked.calls, asked.tokens, asked.passes))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

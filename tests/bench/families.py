"""`lightning train` with a real vLLM on a tiny random folder of each family: first update, resume, the model that is left.

One line for each family: whether vLLM served it, which path the steps took, and the largest |trainer - sampler| logprob of the
first step (the folder's own weights) and of the second (weights that were handed over, to a vLLM started again). A family that
vLLM cannot serve is named with the reason, and the others go on.

    python tests/bench/families.py [FAMILY ...] [--out FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import urllib.request
from pathlib import Path

from lightning.config import Config, with_settings
from lightning.errors import LightningError
from lightning.testing.tiny_models import FAMILIES, Family, make_tiny_family
from lightning.trainer import Trainer
from lightning.types import LLM, Task

SETTINGS: dict[str, object] = {
    "engine.lr": 1e-3,
    "engine.step": "tree",
    "policy_server.max_model_len": 256,
    "policy_server.kv_cache_bytes": 64 * 2**20,
    "policy_server.start_timeout": 120,
    "runner.concurrency": 4,
    "trainer.trackers": ("jsonl",),
}


def agent(task: Task, llm: LLM) -> float:
    """One call; the reward is the share of its characters that are in the first half of ASCII's letters."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": str(task.input)}], "max_tokens": 16}
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{llm.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"] or ""
    return sum(letter.lower() in "abcdefghijklm" for letter in said) / max(1, len(said))


def train(family: Family, out: Path) -> dict[str, object]:
    """Two steps, the second after a resume; what the records say of them."""
    from transformers import AutoModelForCausalLM

    shutil.rmtree(out, ignore_errors=True)
    folder = make_tiny_family(out / "folder", family)
    config = with_settings(Config(), SETTINGS)
    for steps in (1, 2):
        Trainer(
            folder,
            "grpo:group_size=4",
            config=config,
            steps=steps,
            tasks_per_step=2,
            out=out / "run",
            resume=steps > 1,
            progress=False,
        ).fit(agent, ["write a word", "write another"])
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in (one.get("metrics", one) for one in lines) if "grad_norm" in line]
    _, report = AutoModelForCausalLM.from_pretrained(out / "run" / "model", output_loading_info=True)
    return {
        "tree": [step["tree"] for step in taken],
        "stepped": [step["stepped"] for step in taken],
        "gap": [step["max_logprob_gap"] for step in taken],
        "missing": sorted(report["missing_keys"]),
    }


def main(families: list[Family], out: Path, file: Path | None) -> int:
    """Try all of them; returns how many failed."""
    found: dict[str, dict[str, object]] = {}
    for family in families:
        began = time.monotonic()
        try:
            found[family] = train(family, out / family)
        except LightningError as error:
            found[family] = {"failed": f"{type(error).__name__}: {error}"}
        found[family]["seconds"] = round(time.monotonic() - began, 1)
        sys.stdout.write(f"{family}: {json.dumps(found[family])}\n")
        sys.stdout.flush()
    if file is not None:
        file.write_text(json.dumps(found, indent=2) + "\n")
    return sum("failed" in result for result in found.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="none: all")
    parser.add_argument("--out", type=Path, default=Path("bench/families"), help="folder for models and runs")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    sys.exit(min(main(given.families or list(FAMILIES), given.out, given.json), 1))

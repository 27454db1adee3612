"""`lightning train` with a real vLLM on a tiny random folder of each family: first update, resume, the model that is left.

One line for each family: whether vLLM served it, which path the steps took, and the largest |trainer - sampler| logprob of the
first step (the folder's own weights) and of the second (weights that were handed over, to a vLLM started again). A family that
vLLM cannot serve is named with the reason, and the others go on. A name of `KINDS` stands for a model that an engine could
train as another one than vLLM serves; `family_table.py` tries a hundred families without vLLM.

    python tests/bench/families.py [FAMILY or KIND ...] [--out FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import urllib.request
from pathlib import Path
from typing import cast

from lightning.config import Config, with_settings
from lightning.errors import LightningError
from lightning.testing.tiny_models import CHAT_TEMPLATE, END_OF_TEXT, IM_END, make_tiny_tokenizer
from lightning.trainer import Trainer
from lightning.types import LLM, Task

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.tiny_families import FAMILIES, Family, make_tiny_family

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.family_table import FACTORS, LONGROPE, VOCAB, Case, configuration

SETTINGS: dict[str, object] = {
    "engine.lr": 1e-3,
    "engine.step": "tree",
    "policy_server.max_model_len": 256,
    "policy_server.kv_cache_bytes": 64 * 2**20,
    "policy_server.start_timeout": 120,
    "runner.concurrency": 4,
    "trainer.trackers": ("jsonl",),
}

LENGTH = 256
KINDS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "adapters on a table": (
        "qwen3",
        {"tie_word_embeddings": False},
        {"engine.lora.rank": 4, "engine.lora.target_modules": ["embed_tokens", "lm_head"], "engine.lr": 0.05},
    ),
    "noise": ("seed_oss", {}, {"engine.gradient_checkpointing": True}),
    "longrope": (
        "phi3",
        {
            "rope_parameters": LONGROPE | FACTORS | {"original_max_position_embeddings": 128},
            "original_max_position_embeddings": 128,
        },
        {},
    ),
    "cap": ("gemma2", {"sliding_window": 2 * LENGTH}, {}),
}
"""Kinds of what a token's logprob could depend on beside the tokens before it: `model_type`, its configuration, settings."""


def make_kind(folder: Path, kind: str) -> Path:
    """A tiny model of one of the `KINDS`, with a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    name, more, _ = KINDS[kind]
    config = configuration(Case(name, {"max_position_embeddings": 2 * LENGTH, "sliding_window": None} | more))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tiny_tokenizer(VOCAB),
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
    )
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def agent(task: Task, llm: LLM) -> float:
    """One call; the reward is the share of its characters that are in the first half of ASCII's letters."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": str(task.input)}], "max_tokens": 16}
    headers = {"authorization": f"Bearer {llm.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{llm.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"] or ""
    return sum(letter.lower() in "abcdefghijklm" for letter in said) / max(1, len(said))


def train_kind(kind: str, out: Path) -> dict[str, object]:
    """Two steps without a resume; the gaps before and after an update."""
    shutil.rmtree(out, ignore_errors=True)
    folder = make_kind(out / "folder", kind)
    config = with_settings(Config(), SETTINGS | {"engine.step": "linear"} | KINDS[kind][2])
    trainer = Trainer(
        folder, "grpo:group_size=4", config=config, steps=2, tasks_per_step=2, out=out / "run", progress=False
    )
    trainer.fit(agent, ["write a word", "write another"])
    return _taken(out)


def _taken(out: Path) -> dict[str, object]:
    """What a run's records say of its steps."""
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in (one.get("metrics", one) for one in lines) if "grad_norm" in line]
    names = {"tree": "tree", "stepped": "stepped", "gap": "max_logprob_gap", "mean gap": "mean_logprob_gap"}
    return {name: [step[key] for step in taken] for name, key in names.items()}


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
    _, report = AutoModelForCausalLM.from_pretrained(out / "run" / "model", output_loading_info=True)
    return _taken(out) | {"missing": sorted(report["missing_keys"])}


def main(families: list[str], out: Path, file: Path | None) -> int:
    """Try all of them; returns how many failed."""
    found: dict[str, dict[str, object]] = {}
    for family in families:
        began = time.monotonic()
        try:
            place = out / family.replace(" ", "-")
            found[family] = train_kind(family, place) if family in KINDS else train(cast("Family", family), place)
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

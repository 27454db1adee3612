"""From demonstrations to a model's folder, and the command line that every `make_model` has."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lightning_examples.recipe.chatml import PIECES, VOCABULARY, Conversation, build_tokenizer, encode, render
from lightning_examples.recipe.model import build, save, tiny_config
from lightning_examples.recipe.pretrain import Plan, Stage, pretrain

log = logging.getLogger(__name__)


def make_folder(
    folder: Path,
    demonstrations: Sequence[tuple[Sequence[Conversation], float]],
    plan: Plan,
    pieces: str = PIECES,
    vocab_size: int = VOCABULARY,
) -> None:
    """Write tokenizer, configuration and weights to `folder`; minutes on one core.

    `demonstrations` are the stages of the warm start, in order, each with its share of the steps (their sum is 1). The
    tokenizer, the first weights and the order of rows follow from them and from `plan.seed`; `vocab_size` and `pieces` are
    the tokenizer's.
    """
    started = time.process_time()
    texts = (render(conversation) for stage, _ in demonstrations for conversation in stage)
    tokenizer = build_tokenizer(texts, vocab_size, pieces)
    stages = [
        Stage([encode(tokenizer, conversation) for conversation in stage], share) for stage, share in demonstrations
    ]
    model = build(tiny_config(tokenizer), plan.seed)
    log.info("%d tokens in the vocabulary, %d weights", len(tokenizer), model.num_parameters())

    def report(step: int, loss: float) -> None:
        if step % 250 == 0:
            log.info("step %d: loss %.3f, %.0f s of CPU", step, loss, time.process_time() - started)

    pretrain(model, stages, plan, report)
    save(model, tokenizer, folder)


def command(about: str | None, make: Callable[[Path, int, Plan], None], steps: int) -> None:
    """Read `OUT --seed N --steps N` from the command line and call `make(folder, seed, plan)`, on one thread."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    make(options.folder, options.seed, Plan(steps=options.steps, seed=options.seed))

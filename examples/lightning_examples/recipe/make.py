"""From demonstrations to a model's folder, and the command line that every `make_model` has."""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lightning.types import Task

from lightning_examples.recipe.chatml import PIECES, VOCABULARY, Conversation, build_tokenizer, encode, render
from lightning_examples.recipe.model import build, save, tiny_config
from lightning_examples.recipe.pretrain import Plan, Stage, pretrain

log = logging.getLogger(__name__)


CLEANER_SHARE = 0.87
"""Cleaner demonstrations come first and teach the form, what to copy, and to call tools; the noisy ones then make the model
mediocre."""


def make_solver(
    folder: Path,
    problems: Sequence[Task],
    cleaner: Callable[[Task, random.Random], Conversation],
    noisy: Callable[[Task, random.Random], Conversation],
    grade: Callable[[str, Task], float],
    plan: Plan,
) -> None:
    """As `make_folder`, for an agent that answers problems: the first of them are demonstrated by `cleaner`, the others by
    `noisy`. How often either is right is logged."""
    rng = random.Random(f"demonstrations {plan.seed}")  # noqa: S311 — reproducible, not secret
    cut = round(len(problems) * CLEANER_SHARE)
    well = [cleaner(task, rng) for task in problems[:cut]]
    badly = [noisy(task, rng) for task in problems[cut:]]
    right = success(well, problems[:cut], grade), success(badly, problems[cut:], grade)
    log.info("demonstrators are right in %.2f and %.2f", *right)
    make_folder(folder, well, badly, plan)


def success(
    demonstrations: Sequence[Conversation], problems: Sequence[Task], grade: Callable[[str, Task], float]
) -> float:
    """Share of demonstrations whose last message is the right answer."""
    last = (conversation.messages[-1].get("content") for conversation in demonstrations)
    return sum(grade(str(text), task) for text, task in zip(last, problems, strict=True)) / len(problems)


def make_folder(
    folder: Path,
    cleaner: Sequence[Conversation],
    noisy: Sequence[Conversation],
    plan: Plan,
    pieces: str = PIECES,
    vocab_size: int = VOCABULARY,
) -> None:
    """Write tokenizer, configuration and weights to `folder`; minutes on one core.

    The warm start is on the cleaner demonstrations for `CLEANER_SHARE` of the steps, then on the noisy ones. The tokenizer, the
    first weights and the order of rows follow from them and from `plan.seed`; `vocab_size` and `pieces` are the tokenizer's.
    """
    started = time.process_time()
    tokenizer = build_tokenizer(map(render, [*cleaner, *noisy]), vocab_size, pieces)
    stages = [
        Stage([encode(tokenizer, conversation) for conversation in stage], share)
        for stage, share in ((cleaner, CLEANER_SHARE), (noisy, 1 - CLEANER_SHARE))
    ]
    model = build(tiny_config(tokenizer), plan.seed)
    log.info("%d tokens in the vocabulary, %d weights", len(tokenizer), model.num_parameters())

    def report(step: int, loss: float) -> None:
        if step % 250 == 0:
            log.info("step %d: loss %.3f, %.0f s of CPU", step, loss, time.process_time() - started)

    pretrain(model, stages, plan, report)
    save(model, tokenizer, folder)


def command(about: str | None, make: Callable[[Path, Plan], None], steps: int) -> None:
    """Read `OUT --seed N --steps N` from the command line and call `make(folder, plan)`, on one thread."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    make(options.folder, Plan(steps=options.steps, seed=options.seed))

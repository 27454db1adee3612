"""`python -m lightning_examples.paper.calcx.prepare FOLDER`: Calc-X by the library `datasets`, and tasks made of it.

Calc-X (arXiv 2305.15017) is at https://huggingface.co/datasets/MU-NLPC/Calc-X: 319,169 problems to train on, made of GSM8K,
Ape210K, AQuA-RAT, MathQA, SVAMP, MAWPS and ASDiv; 3,277 to validate on and 6,096 to test with.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
from pathlib import Path
from typing import Any

from lightning.errors import MissingExtraError

from lightning_examples.math_autogen.tasks import read_calcx
from lightning_examples.paper.fetch import write_tasks
from lightning_examples.paper.recipe import TRAIN, VAL

log = logging.getLogger(__name__)

NAME = "MU-NLPC/Calc-X"
COLUMNS = ["id", "question", "result"]
"""What the tasks are made of; `chain`, the worked solution, is not shown to anybody."""
TRAINED = 20_000
"""Of the problems to train on: more than the recipe's steps ask for, and a list that fits into memory."""
HELD_OUT = 500
"""Of the problems to validate on; an evaluation then costs as many rollouts as two steps."""


def main() -> None:
    """Download and convert; `datasets` keeps what it has downloaded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    splits = _datasets().load_dataset(NAME)
    rows = {split: folder / f"calc-x-{split}.jsonl" for split in ("train", "validation")}
    for split, file in rows.items():
        splits[split].select_columns(COLUMNS).to_json(file, force_ascii=False)
    convert(rows["train"], rows["validation"], folder)


def convert(train: Path, validation: Path, folder: Path) -> None:
    """Write a sample of each of two files as tasks. Raises `DataError` naming a line that is not Calc-X's."""
    counts = [
        write_tasks(random.Random(0).sample(tasks, min(most, len(tasks))), folder / file)  # noqa: S311 — a sample
        for tasks, most, file in ((read_calcx(train), TRAINED, TRAIN), (read_calcx(validation), HELD_OUT, VAL))
    ]
    log.info("%s: %d tasks, %d held out", folder, *counts)


def _datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError("verl", "datasets") from error


if __name__ == "__main__":
    main()

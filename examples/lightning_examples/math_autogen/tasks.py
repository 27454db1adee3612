"""Word problems: generated ones, and readers for Calc-X and GSM8K on disk.

The invariant: a hash of the question's text alone decides whether it is held out, whatever file it came from.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from lightning.errors import DataError
from lightning.types import Task

from lightning_examples.word_problems import describe, is_held_out, tasks, val_tasks

__all__ = ["NUMBER", "describe", "number", "read_calcx", "read_gsm8k", "split", "tasks", "val_tasks"]

log = logging.getLogger(__name__)

NUMBER = r"-?\$?(?:(?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d+|/\d+)?|\.\d+)"
"""What counts as a number: 18, -3.5, $20, 1,200, 1_200, 2/5."""


def number(text: str) -> Fraction | None:
    """The exact value of a text that is a number and nothing else; None for any other text."""
    if not re.fullmatch(NUMBER, text, re.ASCII):
        return None
    try:
        return Fraction(re.sub(r"[$,_]", "", text))
    except ZeroDivisionError:
        return None


def read_calcx(path: Path) -> list[Task]:
    """Tasks of a Calc-X file (arXiv 2305.15017): JSON lines with `id`, `question`, `chain`, `result`, `result_float`, ...

    The `chain`, a worked solution with `<gadget id="calculator">` calls, is not used: the agent finds its own way. Rows
    whose result is no number (the letter of a choice) are left out. Raises `DataError`, naming the line.
    """
    found: list[Task] = []
    left_out = 0
    for _, row in _rows(path, "id", "question", "result"):
        value = number(row["result"].strip())
        if value is None:
            left_out += 1
        else:
            found.append(Task(row["question"], str(value), {"source": "calc-x"}, row["id"]))
    log.info("%s: %d tasks; %d rows left out, whose result is no number", path, len(found), left_out)
    return found


def read_gsm8k(path: Path) -> list[Task]:
    """Tasks of a GSM8K file (arXiv 2110.14168): JSON lines with `question` and `answer`, which ends in `#### 18`.

    Raises `DataError`, naming the line.
    """
    found: list[Task] = []
    for place, row in _rows(path, "question", "answer"):
        _, mark, result = row["answer"].rpartition("####")
        value = number(result.strip())
        if not mark or value is None:
            raise DataError(f"{place}: its answer does not end in `#### ` and a number: {row['answer'][-40:]!r}")
        found.append(Task(row["question"], str(value), {"source": "gsm8k"}))
    return found


def split(found: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """Tasks to train on, and the one in eight that is held out."""
    held_out = [is_held_out(str(task.input)) for task in found]
    return (
        [task for task, held in zip(found, held_out, strict=True) if not held],
        [task for task, held in zip(found, held_out, strict=True) if held],
    )


def _rows(path: Path, *keys: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Each line's place and the texts under `keys`; empty lines are skipped."""
    with path.open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines, 1):
            place = f"{path}, line {line_number}"
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{place} is not JSON ({error}): give the data set as JSON lines") from error
            missing = [key for key in keys if not isinstance(row, dict) or not isinstance(row.get(key), str)]
            if missing:
                raise DataError(f"{place} has no text under {', '.join(missing)}: is it another data set's file?")
            yield place, {key: row[key] for key in keys}

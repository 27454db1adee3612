"""`python -m lightning_examples.paper.spider.prepare FOLDER`: Spider's archive, and tasks made of it.

Spider (arXiv 1809.08887, CC BY-SA 4.0) is at https://yale-lily.github.io/spider: an archive of 200 MB in Google Drive.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from lightning.types import Task

from lightning_examples.paper.fetch import archive_folder, write_tasks
from lightning_examples.paper.recipe import TRAIN, VAL
from lightning_examples.sql_langchain.execution import execute
from lightning_examples.sql_langchain.spider import read_spider

log = logging.getLogger(__name__)

DRIVE_ID = "1403EGqzIDoHMdQF4c9Bkyl7dZLZ5Wt6J"
HELD_OUT = 500
"""Questions of `dev.json` to evaluate on, as many as in Agent Lightning's example; no training task has their databases."""


def main() -> None:
    """Download, unpack and convert; what is there already is used again."""
    folder, found = archive_folder(__doc__, DRIVE_ID, "spider_data.zip", "spider", "tables.json")
    convert(found, folder)


def convert(spider: Path, folder: Path) -> None:
    """Write the tasks of Spider's folder. `read_spider` says what it raises."""
    train = write_tasks(sound(read_spider(spider, "train")), folder / TRAIN)
    val = write_tasks(sound(read_spider(spider, "dev", HELD_OUT)), folder / VAL)
    log.info("%s: %d tasks, %d of them held out", folder, train + val, val)


def sound(tasks: Iterable[Task]) -> Iterator[Task]:
    """Those whose reference query runs within the agent's own limits: nobody could be judged by the others."""
    for task in tasks:
        database = cast("dict[str, str]", task.input)["database"]
        if error := execute(database, str(task.expected)).error:
            log.info("%s is left out: its reference query fails: %s", task.id, error)
        else:
            yield task


if __name__ == "__main__":
    main()

"""`python -m lightning_examples.paper.musique.prepare FOLDER`: MuSiQue's archive, tasks made of it, and the corpus.

MuSiQue (arXiv 2108.00573, CC BY 4.0) is at https://github.com/StonyBrookNLP/musique; its `download_data.sh` names the archive
in Google Drive. The corpus are the paragraphs of all questions, to train on and held out.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_examples.paper.fetch import archive_folder, write_tasks
from lightning_examples.paper.recipe import TRAIN, VAL
from lightning_examples.rag_openai_agents.musique import read_musique
from lightning_examples.rag_openai_agents.retriever import load_corpus, save_corpus

log = logging.getLogger(__name__)

DRIVE_ID = "1tGdADlNjWFaHLeZZGShh2IRcpO6Lv24h"
FILES = ("musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl")
"""The answerable questions: 19,938 to train on, and 2,417. The answers of the test set are not public."""
CORPUS = "corpus.jsonl"
HELD_OUT = 500
"""Questions of the second file to evaluate on; an evaluation then costs as many rollouts as two steps."""


def main() -> None:
    """Download, unpack and convert; what is there already is used again."""
    folder, found = archive_folder(__doc__, DRIVE_ID, "musique_v1.0.zip", "musique", FILES[0])
    convert(found, folder)


def convert(musique: Path, folder: Path) -> None:
    """Write the tasks and the corpus of MuSiQue's folder. Raises `DataError` naming a line that is not MuSiQue's."""
    parts = [folder / f"{CORPUS}.{split}" for split in (TRAIN, VAL)]
    train, held_out = (read_musique(musique / file, part) for file, part in zip(FILES, parts, strict=True))
    documents = dict.fromkeys(document for part in parts for document in load_corpus(part))
    save_corpus(documents, folder / CORPUS)
    for part in parts:
        part.unlink()
    # Evenly over the file, so that every number of hops is in it, however the file is sorted.
    chosen = held_out[:: max(1, len(held_out) // HELD_OUT)][:HELD_OUT]
    counts = write_tasks(train, folder / TRAIN), write_tasks(chosen, folder / VAL)
    log.info("%s: %d tasks, %d held out, %d paragraphs", folder, *counts, len(documents))


if __name__ == "__main__":
    main()

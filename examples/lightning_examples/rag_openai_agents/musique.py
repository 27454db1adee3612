"""Reads MuSiQue (arXiv 2108.00573): multi-hop questions whose paragraphs together are the corpus to search in.

The data is at https://github.com/StonyBrookNLP/musique (CC BY 4.0); a file is `musique_ans_v1.0_train.jsonl`. The invariant:
every paragraph of every question is in the corpus once, supporting or not, so that searching is as hard as it was meant to be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.errors import DataError
from lightning.types import Task

from lightning_examples.rag_openai_agents.retriever import Document, save_corpus


def read_musique(path: Path, corpus: Path) -> list[Task]:
    """One task for each answerable question; writes the paragraphs to `corpus`.

    `expected` are the answer and its aliases, `metadata` has the number of hops and the titles that support the answer.
    Raises `DataError` naming the line that is not MuSiQue's.
    """
    tasks: list[Task] = []
    documents: dict[Document, None] = {}  # in order, once each
    for number, line in enumerate(_lines(path), 1):
        try:
            item = json.loads(line)
            paragraphs = [(Document(str(p["title"]), str(p["paragraph_text"])), p) for p in item["paragraphs"]]
            documents.update((document, None) for document, _ in paragraphs)
            if item["answerable"]:
                supporting = [document.title for document, p in paragraphs if p["is_supporting"]]
                tasks.append(_task(item, supporting))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: not a MuSiQue question ({error!r}): {line[:80]!r}") from error
    save_corpus(list(documents), corpus)
    return tasks


def _task(item: dict[str, Any], supporting: list[str]) -> Task:
    answers = list(dict.fromkeys([str(item["answer"]), *map(str, item["answer_aliases"])]))
    return Task(
        id=str(item["id"]),
        input=str(item["question"]),
        expected=list(answers),
        metadata={"hops": len(item["question_decomposition"]), "supporting": list(supporting)},
    )


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        yield from (line for line in file if line.strip())

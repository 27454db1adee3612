"""What the agent searches with: BM25 by default, embeddings or anything else with a `search` method instead.

The invariant: a retriever is pure; the same query over the same documents gives the same answer in every process.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning import MissingExtraError
from lightning.errors import DataError


@dataclass(frozen=True, slots=True)
class Document:
    """One passage."""

    title: str
    text: str

    def __str__(self) -> str:
        """As it is indexed."""
        return f"{self.title} {self.text}"


class Retriever(Protocol):
    """Finds documents; give the agent your own. It must be picklable, since agents run in other processes."""

    def search(self, query: str, k: int) -> Sequence[Document]:
        """At most `k` documents, best first; none when nothing matches."""


class Bm25:
    """BM25 (Robertson et al., 1994) over titles and texts, by the library bm25s."""

    def __init__(self, documents: Sequence[Document], file: Path | None = None) -> None:
        bm25s = _import("bm25s", "retrieval")
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG for itself, whatever the program's level
        self._file = file
        self._documents = _some(documents)
        self._tokenize = functools.partial(bm25s.tokenize, stopwords="en", show_progress=False)
        self._index = bm25s.BM25()
        self._index.index(self._tokenize([str(document) for document in documents]), show_progress=False)

    def search(self, query: str, k: int) -> Sequence[Document]:
        """At most `k` documents that share a word with the query."""
        (words,) = self._tokenize([query], return_ids=False)
        if not words:
            return []
        k = min(k, len(self._documents))
        (found,), (scores,) = self._index.retrieve([words], k=k, show_progress=False)
        return [self._documents[i] for i, score in zip(found, scores, strict=True) if score > 0]

    def __reduce__(self) -> tuple[Any, ...]:
        # A file travels as its path: the process that forks the agents' processes then reads it once for all of them.
        return (bm25_of, (self._file,)) if self._file else (Bm25, (self._documents,))


class Embeddings:
    """Cosine similarity of sentence embeddings; `model` is any that sentence-transformers loads."""

    def __init__(self, documents: Sequence[Document], model: str = "BAAI/bge-base-en-v1.5") -> None:
        library = _import("sentence_transformers", "embeddings")
        self._documents = _some(documents)
        self._encode = functools.partial(library.SentenceTransformer(model).encode, normalize_embeddings=True)
        self._vectors = self._encode([str(document) for document in documents])  # (documents, dimensions)

    def search(self, query: str, k: int) -> Sequence[Document]:
        """The `k` nearest documents."""
        similar = self._vectors @ self._encode([query])[0]
        return [self._documents[i] for i in (-similar).argsort(kind="stable")[:k]]


@functools.cache
def bm25_of(path: Path) -> Bm25:
    """The index of a JSON Lines file. Made once in a process; processes forked later share its pages."""
    return Bm25(load_corpus(path), path)


def load_corpus(path: Path) -> list[Document]:
    """Read `{"title": ..., "text": ...}` lines. Raises `DataError` naming the line that is not one."""
    documents = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                fields = json.loads(line)
                documents.append(Document(str(fields["title"]), str(fields["text"])))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f'{path}, line {number}: not {{"title": ..., "text": ...}}: {line[:80]!r}') from error
    return documents


def save_corpus(documents: Iterable[Document], path: Path) -> None:
    """Write what `load_corpus` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in documents)


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(extra, module) from error


def _some(documents: Sequence[Document]) -> Sequence[Document]:
    if not documents:
        raise DataError("there is nothing to search in: give at least one document")
    return documents

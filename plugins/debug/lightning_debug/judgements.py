"""What a judge has answered, in a file that several processes may use at once.

The invariant: an answer is durable before it is used, and the first one for a question is the only one, so that an audit finds
what training used. A key is a hash of all that was asked; neither texts of rollouts nor credentials are kept.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Answer:
    """Scores in the order in which rollouts were shown; None where the judge gave none, with the beginning of what it said."""

    scores: tuple[float, ...] | None
    said: str = ""


TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS judgements (key TEXT PRIMARY KEY, scores TEXT, said TEXT NOT NULL) WITHOUT ROWID"
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge says of a group. `scores` are from 0 to 1, one for each rollout, means over the samples; None where no
    sample was usable. `agreement` is the share of pairs of rollouts that two samples order alike, None with one sample or one
    rollout. `nonsense` are the beginnings of answers that could not be used, one for each such sample."""

    scores: tuple[float, ...] | None
    agreement: float | None
    nonsense: tuple[str, ...] = ()


NOTHING: Final = Judgement((), None)
"""Of no rollouts."""


class Judgements:
    """The `file`, in the user's folder of caches unless given, which is made where it is missing. Raises `ConfigError` where it
    cannot be used."""

    def __init__(self, file: str | Path | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.file = Path(file).expanduser() if file else cache / "lightning" / "judgements.db"

    def get(self, key: str) -> Answer | None:
        """The answer to a question, or None."""
        with self._opened() as database:
            row = database.execute("SELECT scores, said FROM judgements WHERE key = ?", (key,)).fetchone()
        return None if row is None else Answer(None if row[0] is None else tuple(json.loads(row[0])), row[1])

    def keep(self, key: str, answer: Answer) -> Answer:
        """Keep an answer; return the one that counts, which another process may have been first with."""
        scores = None if answer.scores is None else json.dumps(answer.scores)
        said = answer.said.encode("utf-8", "replace").decode()
        with self._opened() as database, database:
            database.execute("INSERT OR IGNORE INTO judgements VALUES (?, ?, ?)", (key, scores, said))
        return self.get(key) or answer

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file, timeout=60.0)) as database:
                database.execute("PRAGMA synchronous = FULL")
                database.execute(TABLE)
                yield database
        except (OSError, sqlite3.Error, ValueError) as error:
            raise ConfigError(
                f"the judge's answers cannot be kept in {self.file}: {error}. Give the judge another file (cache=...), or "
                "move this one away: what it held is asked again"
            ) from error

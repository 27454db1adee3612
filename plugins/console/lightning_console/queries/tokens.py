"""What token ids stand for: the texts of a run's tokens.

The invariant: a text comes from the tokenizer in the folder of the model that the run names, or it is the id itself; nothing is
downloaded and no code of a model is run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning.store.url import parse
from lightning.types import Run

from lightning_console.places import SERVER, Located

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE: Final = "tokenizer.json"
WORD_START: Final = "▁"
"""How SentencePiece writes the space before a word, which decoding one token alone would drop."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer of a run's model; `missing` says why there is none, empty where there is."""

    tokenizer: Tokenizer | None = None
    missing: str = ""

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself; `#ID` where it is unknown."""
        return [self._text(token) for token in ids]

    def text(self, ids: Sequence[int]) -> str:
        """All tokens together, special ones included; the ids where there is no tokenizer."""
        if self.tokenizer is None:
            return " ".join(f"#{token}" for token in ids)
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _text(self, token: int) -> str:
        if self.tokenizer is None or (piece := self.tokenizer.id_to_token(token)) is None:
            return f"#{token}"
        text = str(self.tokenizer.decode([token], skip_special_tokens=False))
        if piece.startswith(WORD_START) and not text.startswith(" "):
            text = f" {text}"
        return text or piece


def vocabulary_of(located: Located) -> Vocabulary:
    """The tokenizer of the model that the run began with, or the one in the run's own folder, if the model has moved."""
    model = _model(located.run)
    if not model:
        return Vocabulary(missing="the run names no model, so that tokens are shown as ids")
    if located.url == SERVER:
        return Vocabulary(missing="tokens are shown as ids: a server reads no folder that a run names")
    for folder in _folders(model, located.url):
        file = folder / FILE
        try:
            return Vocabulary(_loaded(file, file.stat().st_mtime_ns))
        except (OSError, ValueError):
            continue
    return Vocabulary(
        missing=f"tokens are shown as ids: there is no {FILE} of the run's model {model} that can be read here"
    )


def _model(run: Run) -> str:
    return str(run.config.get("model") or run.config.get("evaluates") or "")


def _folders(model: str, url: str) -> list[Path]:
    folders = [Path(model)]
    if url.startswith("sqlite:"):
        folders.append(Path(parse(url).path).parent / "model")
    return folders


@functools.lru_cache(maxsize=4)
def _loaded(file: Path, _changed: int) -> Tokenizer:
    """Raises `ValueError` for a file that is none."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises its errors as plain exceptions
        raise ValueError(str(error)) from error

"""Model folders, read by `transformers`.

The invariant: weights that a folder does not hold whole are refused by name; left to itself, `transformers` makes them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_model(folder: Path, kind: Any = None, **how: Any) -> PreTrainedModel:
    """The model of a folder, by an auto class of `transformers` (`AutoModelForCausalLM` if it is not told), whose
    `from_pretrained` is told `how`; on the device `meta` only names and shapes of tensors are read.

    Raises `EngineError` naming the folder and what is wrong: it is none, it cannot be read, or it lacks tensors.
    """
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise EngineError(
            f"{folder} is not a model folder: it has no config.json. Give a folder that transformers can load"
        )
    try:
        with _no_progress_bars():
            model, report = (kind or AutoModelForCausalLM).from_pretrained(
                folder, local_files_only=True, output_loading_info=True, **how
            )
    except Exception as error:
        raise EngineError(f"cannot load a causal language model from {folder}: {error}") from error
    broken = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if broken:
        raise EngineError(
            f"the weights in {folder} do not fit its config.json: {len(broken)} tensors are missing or have another shape, "
            f"for example {broken[0]}. Copy the model again"
        )
    found: PreTrainedModel = model
    return found


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()

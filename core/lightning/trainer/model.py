"""Where a model lies: a folder on this machine, or a name on a model hub."""

from __future__ import annotations

import re
from pathlib import Path

from lightning.errors import ConfigError, MissingExtraError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(model: str | Path) -> Path:
    """The folder of a model. Raises `ConfigError` when there is none, or it is not a model's."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} is not a model folder: it has no config.json. Give the folder that `save_pretrained` wrote."
            )
        return folder.resolve()
    if folder.exists():
        raise ConfigError(f"{folder} is a file; give the model's folder")
    if not _HUB_NAME.fullmatch(str(model)) or str(model).startswith("."):
        raise ConfigError(f"the model folder {model} does not exist")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise MissingExtraError("torch", "huggingface_hub") from error
    try:
        return Path(snapshot_download(str(model)))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"no model {model!r}: there is no such folder here, and the hub did not give it ({type(error).__name__}: {error})"
        ) from error

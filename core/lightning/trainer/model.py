"""Where a model lies, and the dtype that trainer and sampler compute it in.

The invariant: where both `engine.dtype` and `policy_server.dtype` are left to lightning, or one of them, they agree, since each
logprob gap between trainer and sampler is a ratio that is not the policy's; one that was named is never changed.
"""

from __future__ import annotations

import re
from pathlib import Path

from lightning.config import Config
from lightning.config.load import with_settings
from lightning.errors import ConfigError, MissingExtraError
from lightning.policy_server.auto_settings import choose_dtype, this_machine
from lightning.policy_server.model_facts import read_facts
from lightning.policy_server.profiles import pick_device

NAMES = {"float": "float32", "float32": "float32", "bfloat16": "bfloat16"}
"""vLLM's names of dtypes that the torch engine has too, and what that calls them."""


def with_dtypes(config: Config, model: Path, engine: str) -> Config:
    """The settings with a dtype for both sides. Nothing is changed for a server that is attached: its dtype is its own.

    An engine other than `torch` keeps its own `auto`, and vLLM on a CPU is float32 beside it, as before.
    """
    ours, theirs = config.engine.dtype, config.policy_server.dtype
    if config.policy_server.attach or (ours != "auto" and theirs != "auto"):
        return config
    if ours != "auto":
        return with_settings(config, {"policy_server.dtype": ours})
    if theirs != "auto":
        known = NAMES.get(theirs) if engine == "torch" else None
        return with_settings(config, {"engine.dtype": known}) if known else config
    device = pick_device(config.policy_server)
    if engine != "torch":
        return config if device == "cuda" else with_settings(config, {"policy_server.dtype": "float32"})
    dtype, _ = choose_dtype(read_facts(model), device, this_machine())
    return with_settings(config, {"policy_server.dtype": dtype, "engine.dtype": dtype})


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

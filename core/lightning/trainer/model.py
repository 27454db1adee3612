"""The model of a run: where it lies, the dtype that trainer and sampler compute it in, its optimizer and the learning rate of
each step.

The invariant: where both `engine.dtype` and `policy_server.dtype` are left to lightning, or one of them, they agree, since each
logprob gap between trainer and sampler is a ratio that is not the policy's; a dtype that was named is never changed. A step's
rate depends on the settings and on the number of committed steps before alone, so that a resumed run goes on where it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, cast

from lightning.config import Config, LoraConfig
from lightning.config.load import recorded_config, with_settings
from lightning.engines.protocol import Head, OptimizerConfig
from lightning.errors import ConfigError, MissingExtraError, PolicyServerError
from lightning.plugins import plugins
from lightning.policy_server.auto_settings import choose_dtype, pick_device, this_machine
from lightning.policy_server.model_folder import folder_tensors, read_facts
from lightning.policy_server.policies import PolicySet
from lightning.types import POLICY, Json, Run

DTYPE_NAMES = {"float": "float32", "float32": "float32", "bfloat16": "bfloat16"}
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
        known = DTYPE_NAMES.get(theirs) if engine == "torch" else None
        return with_settings(config, {"engine.dtype": known}) if known else config
    device = pick_device(config.policy_server)
    if engine != "torch":
        return config if device == "cuda" else with_settings(config, {"policy_server.dtype": "float32"})
    dtype, _ = choose_dtype(read_facts(model), device, this_machine())
    return with_settings(config, {"policy_server.dtype": dtype, "engine.dtype": dtype})


def models_in(folder: Path) -> dict[str, Path]:
    """The model folders of an exported model by policy: the folder itself for the one policy of a run (`POLICY`), or a folder
    for each of several policies, in the order of their names. Empty where no model is."""
    if (folder / "config.json").is_file():
        return {POLICY: folder}
    return {file.parent.name: file.parent for file in sorted(folder.glob("*/config.json"))}


def adapters_of(config: Config) -> dict[str, LoraConfig | None]:
    """The adapters that a run with these settings trains, by policy; None for one of several policies of which all weights are
    trained. Empty if the run trains all weights of its one policy."""
    if (several := plugins().policy_set(config)) is not None:
        return dict(several.adapters)
    return {} if config.engine.lora is None else {POLICY: config.engine.lora}


def policy_set_of(described: Mapping[str, Json]) -> PolicySet | None:
    """The policies of a run's recorded configuration; None for a run with one policy. Raises `ConfigError` for settings that
    this release does not accept."""
    said = described.get("config")
    return plugins().policy_set(recorded_config(said)[0]) if isinstance(said, Mapping) else None


def policies_of(described: Mapping[str, Json]) -> dict[str, LoraConfig | None]:
    """The trained policies of a run's recorded configuration, with the adapters of each (None: all weights are trained); empty
    for a run with one policy. Raises `ConfigError` for settings that this release does not accept."""
    several = policy_set_of(described)
    return {} if several is None else {name: several.adapters[name] for name in sorted(several.adapters)}


def check_one_model(run: Run) -> None:
    """Raise `ConfigError` for a run whose policies one server cannot answer together: a policy begins as another model than the
    run's, or all weights of a policy are trained."""
    several = policy_set_of(run.config)
    if several is None:
        return
    whole = [name for name, lora in several.adapters.items() if lora is None]
    told = [f"{name} begins as {base}" for name, base in several.bases.items()]
    told += [f"all weights of {', '.join(whole)} are trained"] * bool(whole)
    if told:
        raise ConfigError(
            f"the policies of the run {run.id} have no model in common ({'; '.join(told)}), and one vLLM answers policies "
            "together only as adapters of the run's model"
        )


def with_one_policy(config: Config) -> Config:
    """Return the settings for a server of one model, which answers all agents, whatever policies they have in training."""
    several = plugins().policy_set(config)
    return config if several is None else several.without(config)


def check_policy(run: Run, folder: Path, policy: str, step: int) -> None:
    """Raise `ConfigError` unless a run, in its `folder`, has one model of `policy` after a step: several policies need a name
    (RUN/model/NAME), the one policy of a run has none, and before the first step all are the run's model."""
    several = policy_set_of(run.config)
    trained = [] if several is None else sorted(several.adapters)
    if policy in trained or (not policy and (not trained or not step)):
        return
    known = f"the run {run.id} trains the policies {', '.join(trained)}"
    if not trained:
        raise ConfigError(f"the run {run.id} has one policy, and none called {policy!r}: write {folder}@{step}")
    example = f"as {folder / 'model' / trained[0]}@{step}"
    if not policy:
        raise ConfigError(f"{known}, each with a model of its own: name one of them, {example}")
    if several is not None and policy in several.bases:
        raise ConfigError(f"{known}, and the policy {policy} is not trained: it is {several.bases[policy]}")
    raise ConfigError(
        f"{known}, and not {policy!r}: name one of them, {example}. A policy that is not trained is the run's model, {folder}@0"
    )


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def local_model(model: str | Path) -> Path | None:
    """The folder of a model on this machine; None for a name on a model hub. Raises `ConfigError` for a path that is no model
    folder. Nothing is fetched."""
    if not isinstance(model, (str, Path)):
        raise ConfigError(
            f"the model is {model!r:.80}, neither a folder nor a name on a hub. A run trains one model; its agent and its "
            "tasks are given to Trainer(model).fit(agent, train=tasks)"
        )
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if several := models_in(folder):
                raise ConfigError(
                    f"{folder} has no model of its own, but those of {', '.join(several)}: give one of their folders, as "
                    f"{next(iter(several.values()))}"
                )
            raise ConfigError(
                f"{folder} is not a model folder: it has no config.json. Give the folder that `save_pretrained` wrote."
            )
        return folder.resolve()
    if folder.exists():
        raise ConfigError(f"{folder} is a file; give the model's folder")
    if not _HUB_NAME.fullmatch(str(model)) or str(model).startswith("."):
        raise ConfigError(f"the model folder {model} does not exist")
    return None


def resolve_model(model: str | Path, *, fetch: bool = True) -> Path:
    """The folder of a model, which is fetched from the model hub if it is not on this machine. Without `fetch`, as for a name
    that stands in a run's record, the hub is not asked. Raises `ConfigError` if there is no such model, or if the folder is no
    model's."""
    if (folder := local_model(model)) is not None:
        return folder
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise MissingExtraError("torch", "huggingface_hub") from error
    try:
        return Path(snapshot_download(str(model), local_files_only=not fetch))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if not fetch:
            raise ConfigError(
                f"the model {model} of a hub is not on this machine, and a run's record fetches none: fetch it first "
                f"(hf download {model})"
            ) from error
        raise ConfigError(
            f"no model {model!r}: there is no such folder here, and the hub did not give it ({type(error).__name__}: {error})"
        ) from error


RATES: Final = ((3e6, 2e-3), (60e6, 8e-5), (400e6, 1e-5), (2e9, 5e-6), (10e9, 2e-6), (math.inf, 1e-6))
"""Up to how many parameters which rate, with all weights trained; docs/configuration.md names the source of each."""
ADAPTER_RATE_FACTOR: Final = 10.0
"""How many times as fast adapters learn best (Schulman et al., LoRA Without Regret, 2025)."""


def default_rate(config: Config, model: Path) -> tuple[float, str]:
    """The rate for the model in a folder, and why it is that. One whose size cannot be read gets that of the largest."""
    try:
        size = float(sum(math.prod(spec.shape) for spec in folder_tensors(model).values())) or math.inf
    except PolicyServerError:  # whoever loads it says what is wrong
        size = math.inf
    rate = next(rate for most, rate in RATES if size <= most)
    trained = "all weights"
    if (adapters := adapters_of(config)) and None not in adapters.values():
        rate, trained = rate * ADAPTER_RATE_FACTOR, "adapters"
    of = f"with {size / 1e6:,.3g} M parameters" if math.isfinite(size) else "whose size cannot be read"
    return rate, f"the default for training {trained} of a model {of}"


EARLIER_STEPS: Final = "earlier_steps"
"""The key of a forked run's configuration that says how many steps led to the training state that it began with, in all the
runs before it. Absent where it began with weights alone: the optimizer is then a fresh one."""


def lr_share(config: Config, step: int, earlier: int = 0) -> float:
    """The share of `engine.lr` that a step of the run has.

    It rises linearly over `warmup_steps`. Then it stays, or falls to `min_lr_ratio` at the end of the run's own
    `trainer.steps`: in a line, or by half a cosine (SGDR, arXiv 1608.03983, without restarts). Steps after the last planned
    one have the lowest share. The `earlier` steps of the runs that this one was forked from count for the warm-up alone.
    """
    engine = config.engine
    if earlier + step <= engine.warmup_steps:
        return (earlier + step) / engine.warmup_steps
    if engine.lr_schedule == "constant":
        return 1.0
    risen = max(0, engine.warmup_steps - earlier)
    progress = min(1.0, (step - 1 - risen) / max(1, config.trainer.steps - risen))
    share = 1.0 - progress if engine.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return engine.min_lr_ratio + (1.0 - engine.min_lr_ratio) * share


def rate_of(config: Config, run: Mapping[str, Json], step: int) -> float:
    """The learning rate of a step; `run` is the run's recorded configuration."""
    return full_rate(config) * lr_share(config, step, earlier_steps(run))


def full_rate(config: Config) -> float:
    """`engine.lr`, or the default of an optimizer."""
    return config.engine.lr or OptimizerConfig().lr


def optimizer_of(config: Config) -> OptimizerConfig:
    """The optimizer of the settings."""
    engine = config.engine
    return OptimizerConfig(
        full_rate(config),
        engine.betas,
        engine.weight_decay,
        engine.eps,
        engine.max_grad_norm,
        engine.minibatches,
        engine.epochs,
    )


def made_head(config: Config, recorded: object) -> Head | None:
    """The head of the settings that a run's record says, or whose name is given; None without one. Raises `PluginError` where
    no plugin has it."""
    name = str(recorded or "").partition(" ")[0]
    return cast("Callable[[Config], Head]", plugins().get("heads", name))(config) if name else None


def earlier_steps(run: Mapping[str, Json]) -> int:
    """How many steps led to the training state that a run began with; `run` is its recorded configuration."""
    return int(str(run.get(EARLIER_STEPS, 0)))

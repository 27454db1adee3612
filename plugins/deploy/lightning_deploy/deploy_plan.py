"""The plan of a deployment, made from the arguments of `lightning train`, from which every target is rendered; and the needs of
the trainer's machine.

The invariant: templates decide nothing. A container, a pod and a local process run the same command line, with other addresses
(`Places`); no value in a plan is a secret. The number of GPUs is the one that the command uses, and their memory is computed by
the planner's formulas; a model that does not fit is refused with a remedy.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
from lightning import __version__
from lightning.cli.train import train
from lightning.config import Config, LoraConfig, load_config
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.tracking.trackers import names_of
from lightning.trainer.agents import project_of
from lightning_debug.config import AlertsConfig
from lightning_planner.cluster import GPUS, Cluster, find_gpu
from lightning_planner.memory import Memory, memory
from lightning_planner.shape import Shape, read_shape
from lightning_prompts.config import OptimizerModelConfig
from lightning_record.config import RecordConfig
from lightning_replicas.config import OWN_GPU_SHARE, ReplicasConfig
from lightning_sandbox.config import SandboxConfig
from lightning_verl.config import VerlConfig

from lightning_deploy.agent_sources import (
    AgentSources,
    Included,
    check_arguments,
    digest_of,
    files_below,
    find_sources,
    own_source,
)
from lightning_deploy.sweep import read_sweep

GIB = 2**30
LEAST_MEMORY, LEAST_DISK = 32, 60
"""Basic GiB of a machine's memory (vLLM, torch, the agents' records) and disk (images of the hub, logs, dumps of the
database)."""
MOST_GPUS = 8
"""The most GPUs of one machine."""


@dataclass(frozen=True, slots=True)
class MachineNeeds:
    """The trainer's machine: `gpus` of the kind `gpu` (a name of the planner's table); memory, shared memory and disk in
    GiB. `uses` are those of its GPUs, of several models those of the largest; `notes` say what is not estimated."""

    gpu: str
    gpus: int
    memory: int
    shared_memory: int
    disk: int
    uses: tuple[Memory, ...]
    notes: tuple[str, ...]


def estimate(model: str, config: Config, engine: str, gpu: str) -> MachineNeeds:
    """Return the machine that a training needs. Raises `ConfigError` for one that does not fit, or that needs several
    machines."""
    if gpu not in GPUS:
        raise ConfigError(f"{gpu!r} is no GPU that deployments know: use one of {', '.join(GPUS)}")
    models = _served(config)
    if models > 1 and (engine != "torch" or config.policy_server.is_elsewhere):
        raise ConfigError(
            f"the policies have {models} models with vLLMs of their own, which need the engine torch and vLLMs on the "
            "trainer's machine: leave out --engine, policy_server.placement and policy_server.attach, or let all policies have "
            "adapters of one model (engine.lora, no policies.NAME.base)"
        )
    training = _training_gpus(config, engine)
    gpus = training + _serving_gpus(config)
    if gpus > MOST_GPUS:
        raise ConfigError(
            f"{training} GPUs for training and {gpus - training} for vLLMs: deployments are made for one machine of up to "
            f"{MOST_GPUS} GPUs. Lower policy_server.replicas or policy_server.gpus_each, give fewer policies models of their "
            "own (policies.NAME.base), or have vLLMs elsewhere (policy_server.placement, policy_server.attach)"
        )
    notes = list[str]()
    if models > 1:
        own_models = f"the policies have {models} models with vLLMs of their own"
        notes.append(
            f"{own_models}: of those that are trained, which share a GPU, it was checked that each whose memory is known would "
            "fit alone"
        )
    largest, weights = list[Memory](), 0
    for name, own in _trained(model, config):
        try:
            shape = read_shape(name)
        except ConfigError as error:
            notes.append(f"memory of {name} was not estimated and is not counted, so check that it fits: {error}")
            continue
        uses = _uses(shape, own, gpu, training)
        _check_fits(shape, own, gpu, training, uses, most=1 if models > 1 else MOST_GPUS)
        largest = max(largest, uses, key=lambda each: sum(use.used for use in each))
        weights += 4 * shape.parameters
    # Weights pass through memory on their way to vLLM, and the optimizer's two moments on their way to a checkpoint.
    machine = LEAST_MEMORY + math.ceil(3 * weights / GIB)
    kept = (config.trainer.keep_checkpoints + 1) * 3 * weights
    disk = LEAST_DISK + math.ceil((kept + weights) / GIB)
    return MachineNeeds(gpu, gpus, machine, min(64, 8 * gpus), disk, tuple(largest), tuple(notes))


def _trained(model: str, config: Config) -> list[tuple[str, Config]]:
    """Return each model that the engine holds to train it, with the settings of its training alone. A policy of which all
    weights are trained has a model of its own. Adapters of one model share it: together they have as many weights as adapters
    of the sum of their ranks."""
    several = plugins().policy_set(config)
    if several is None:
        return [(model, config)]
    found, ranks = list[tuple[str, LoraConfig | None]](), Counter[str]()
    for policy, lora in several.adapters.items():
        base = several.bases.get(policy, model)
        if lora is None:
            found.append((base, None))
        else:
            ranks[base] += lora.rank
    found += [(base, LoraConfig(rank=rank)) for base, rank in ranks.items()]
    engine = config.engine
    return [
        (base, config.model_copy(update={"engine": engine.model_copy(update={"lora": lora})})) for base, lora in found
    ]


def _serving_gpus(config: Config) -> int:
    """Return the number of GPUs on which vLLM alone runs; 0 where it has those of the training."""
    replicas = ReplicasConfig.of(config)
    servers = replicas.replicas * _served(config)
    if config.policy_server.is_elsewhere or (servers == 1 and replicas.gpus_each is None):
        return 0
    return servers * (replicas.gpus_each or 1)


def _served(config: Config) -> int:
    """Return the number of models with vLLMs of their own: several only where policies begin as several, or train all
    weights."""
    several = plugins().policy_set(config)
    return 1 if several is None else several.count


def _training_gpus(config: Config, engine: str) -> int:
    if engine != "verl":
        return 1
    verl = VerlConfig.of(config)
    workers, nodes = verl.world_size, verl.nodes
    if nodes > 1 or workers > MOST_GPUS:
        raise ConfigError(
            f"{workers} workers on {nodes} machines: deployments are made for one machine of up to {MOST_GPUS} GPUs. Start Ray "
            "on several yourself, and set engine.verl.address (docs/multi-gpu.md)"
        )
    return max(1, workers)


def _uses(shape: Shape, config: Config, gpu: str, training: int) -> list[Memory]:
    """Return the memory of the GPUs that train, and of those of one of several vLLMs."""
    server = config.policy_server
    each = (ReplicasConfig.of(config).gpus_each or 1) if _serving_gpus(config) else 0
    own = each and "gpu_memory_utilization" not in server.model_fields_set
    share = OWN_GPU_SHARE if own else server.gpu_memory_utilization
    return memory(shape, Cluster(find_gpu(gpu), training + each, each), config.engine, share)


def _check_fits(shape: Shape, config: Config, gpu: str, gpus: int, uses: list[Memory], most: int) -> None:
    """Raise `ConfigError` for a training that does not fit. `most` is the number of GPUs on which it can be."""
    short = next((use for use in uses if not use.fits), None)
    if short is None:
        return
    enough = [f"{count} x {name}" for name in GPUS if (count := _least(shape, config, name, most))]
    cure = "train adapters (engine.lora), or fewer tokens at once (engine.tokens_per_microbatch)"
    if enough:
        more = "" if most == 1 else "; --engine verl --set engine.verl.world_size=N"
        cure = f"it would fit on {', '.join(enough)} (--gpu{more})"
    raise ConfigError(
        f"{shape.name} needs {short.used / 1e9:.0f} GB of each of {gpus} {gpu} for {short.role}, which has "
        f"{short.available / 1e9:.0f}: {cure}"
    )


def _least(shape: Shape, config: Config, gpu: str, most: int) -> int:
    """Return the smallest number of GPUs of one machine, `most` at most, on which the training fits; 0 for none."""
    counts = (n for n in (1, 2, 4, MOST_GPUS) if n <= most)
    return next((n for n in counts if all(use.fits for use in _uses(shape, config, gpu, n))), 0)


OURS = ("out", "store", "resume", "dev", "runner")
"""Options of `lightning train` that a deployment sets."""
PATHS = ("model", "tasks", "val", "config")
"""Options of `lightning train` that may name files of the project."""
PORT = 8000
SMALL = 16_000_000
"""The content of files up to this many bytes is part of the images' tag."""
IMAGE = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses in one target: the URLs of the store and the trainer; the folders of runs, of the clients' token, of the
    administrators' token, and for temporary files."""

    store: str
    trainer: str
    runs: str = "/runs"
    tokens: str = "/tokens"
    admin: str = "/admin"
    scratch: str = "/tmp"  # noqa: S108 — of a container
    host: str = "0.0.0.0"  # noqa: S104 — in a container or pod, whose network policy says who gets there
    port: int = PORT
    server_port: int = PORT


@dataclass(frozen=True, slots=True)
class DeployPlan:
    """A training as several processes. `train` and `runner` are arguments of `lightning train` and `lightning runner`; `data`
    are files for the trainer alone, such as tasks. `secrets` are variables that agents get by reference, `trainer_secrets`
    those of the trainer. `tag` changes whenever the content of the images changes."""

    name: str
    agent: str
    train: tuple[str, ...]
    runner: tuple[str, ...]
    sources: AgentSources
    data: tuple[Path, ...]
    secrets: tuple[str, ...]
    trainer_secrets: tuple[str, ...]
    token_project: str
    machine: MachineNeeds
    clients: int
    concurrency: int
    drain: int
    image: str
    tag: str
    extras: tuple[str, ...]
    python: str = ".".join(platform.python_version_tuple()[:2])
    version: str = __version__

    @property
    def namespace(self) -> str:
        """The name of the deployment's namespace in a cluster."""
        return f"lightning-{self.name}"

    def out(self, places: Places) -> str:
        """Return the run's folder."""
        return f"{places.runs}/{self.name}"

    def token_command(self, places: Places) -> list[str]:
        """Return the command that makes the tokens of clients and administrators, once. A server listens beyond its machine
        only when such tokens exist."""
        return ["make-tokens", places.tokens, places.admin, places.store, self.token_project]

    def trainer_command(self, places: Places, *more: str) -> list[str]:
        """Return the command that trains, or resumes training; agents run elsewhere."""
        settings = {
            "server.host": places.host,
            "server.port": str(places.port),
            "server.public_url": places.trainer,
        }
        own = ["--runner", "remote", "--store", places.store, "--out", self.out(places)]
        own += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        return ["train-or-resume", self.out(places), *self.train, *own, *more]

    def server_command(self, places: Places) -> list[str]:
        """Return the command that serves the console and the control API. It keeps no state, so several may run."""
        address = ["--host", places.host, "--port", str(places.server_port)]
        return ["lightning", "serve", "--store", places.store, *address, "--out", f"{places.scratch}/server"]

    def client_command(self, places: Places) -> list[str]:
        """Return the command of a client that runs agents."""
        token = ["--token-file", f"{places.tokens}/runner"]
        return ["lightning", "runner", "--server", places.trainer, *token, *self.runner, self.agent]


@dataclass(frozen=True, slots=True)
class Options:
    """Names and numbers of a deployment that are no arguments of `lightning train`."""

    gpu: str = "h100"
    clients: int = 2
    image: str = "lightning"
    name: str = ""
    included: Included = field(default_factory=Included)
    secrets: tuple[str, ...] = ()
    trainer_secrets: tuple[str, ...] = ()
    tag: str = ""


def make_plan(arguments: Sequence[str], options: Options, project: Path) -> DeployPlan:
    """Return the plan of the training that `lightning train ARGUMENTS` would begin in the project's folder.

    Raises `ConfigError` for arguments that a deployment cannot keep, and the errors of `find_sources` and `estimate`.
    """
    _check(arguments, options)
    given = _parse(arguments)
    agent = given.get("agent")
    if agent is None:
        raise ConfigError(
            "name the agent: its code is what the clients' image is made of (lightning deploy ... -- MODULE:FUNCTION ...)"
        )
    if "tasks" not in given:
        raise ConfigError("a deployment trains on tasks that agents run: give --tasks (--recorded needs no clients)")
    engine, model = str(given.get("engine", "torch")), str(given["model"])
    overrides = [str(value) for value in given.get("set_", ())]
    config_file = given.get("config")
    config = load_config(config_file, overrides)
    _check_kept(config, given)
    files = {name: Path(str(given[name])) for name in PATHS if name in given}
    data = [_below(project, path, f"--{name}") for name, path in files.items() if path.exists()]
    bases = several.bases if (several := plugins().policy_set(config)) else {}
    data += [
        _below(project, Path(base), f"policies.{name}.base") for name, base in bases.items() if Path(base).exists()
    ]
    module = agent.partition(":")[0]
    prefixed = module in plugins().names("agents")
    needs = (config_file,) if config_file is not None else ()
    included = replace(options.included, paths=(*options.included.paths, *needs))
    sources = find_sources("" if prefixed else module, project, included)
    extras = _extras(config, engine)
    own = _trainer_secrets(config, options)
    return DeployPlan(
        name=checked_name(options.name or _name(module, project, prefixed=prefixed)),
        agent=agent,
        train=tuple(_rebuilt(given)),
        runner=tuple(_runner_arguments(given)),
        sources=sources,
        data=tuple(dict.fromkeys(data)),
        secrets=tuple(sorted({name for name in (*sources.variables, *options.secrets) if VARIABLE.fullmatch(name)})),
        trainer_secrets=own,
        token_project=project_of(config),
        machine=estimate(model, config, engine, options.gpu),
        clients=options.clients,
        concurrency=max(1, config.runner.concurrency // options.clients),
        drain=int(config.runner.drain) + 15,
        image=options.image.rstrip("/"),
        tag=options.tag or _tag(sources, data, extras, project),
        extras=extras,
    )


def _name(module: str, project: Path, *, prefixed: bool) -> str:
    """Return the deployment's name: the agent's module, with the project's folder before it where the module's name is a common
    one."""
    own, folder = module.rpartition(".")[2], project.resolve().name
    if prefixed:
        return folder
    return f"{folder}-{own}" if own in ("agent", "agents", "app", "main", "run") else own


def _tag(sources: AgentSources, data: Sequence[Path], extras: Sequence[str], project: Path) -> str:
    """Return a digest of the content of the images: the agent, its libraries, the trainer's files, lightning. Files larger than
    `SMALL` count by size and time."""
    whole = hashlib.sha256("\n".join((__version__, sources.digest, *sources.requirements, *extras)).encode())
    for path in [inner for root in data for inner in files_below(root, project)]:
        told = (project / path).stat()
        content = f"{told.st_size} {told.st_mtime_ns}" if told.st_size > SMALL else digest_of([path], project)
        whole.update(f"{path} {content}\n".encode())
    kind, place = own_source()
    if kind == "wheel":
        whole.update(hashlib.sha256(Path(place).read_bytes()).digest())
    else:
        package = Path(place)
        whole.update(digest_of(sorted(path.relative_to(package) for path in _code(package)), package).encode())
    return whole.hexdigest()[:12]


def _code(package: Path) -> Iterator[Path]:
    """Yield the files of lightning's own code in a checkout."""
    for room in ("core", "adapters", "plugins"):
        yield from (package / room).rglob("*.py")


def _check_kept(config: Config, given: dict[str, Any]) -> None:
    """Raise `ConfigError` for settings and files that a container would not have."""
    if SandboxConfig.of(config).sandbox != "none":
        raise ConfigError(
            "runner.sandbox: a container is no place for bubblewrap; the clients' containers are the sandbox"
        )
    if "from_run" in given:
        raise ConfigError(
            "--from: the other run is not in the image. Export its model, and give that folder as --model"
        )
    for name in ("tasks", "val"):
        if name in given and not Path(str(given[name])).is_file():
            raise ConfigError(f"--{name} {given[name]} is no file here, so the image cannot have it")


def _trainer_secrets(config: Config, options: Options) -> tuple[str, ...]:
    """Return the variables that the trainer reads: those of its settings, and those that the user named."""
    found = {one.api_key_env for one in RecordConfig.of(config).providers.values()}
    critic = OptimizerModelConfig.of(config)
    found |= {critic.api_key_env} if critic.base_url else set()
    found |= {
        alert.removeprefix("webhook:") for alert in AlertsConfig.of(config).alerts if alert.startswith("webhook:")
    }
    found |= {"WANDB_API_KEY"} if "wandb" in names_of(config) else set()
    return tuple(sorted({name for name in (*found, *options.trainer_secrets) if name}))


def sweep_plans(file: Path, options: Options, project: Path) -> list[DeployPlan]:
    """Return the plan of each run of a sweep's file, named as the run. Raises `ConfigError` as `make_plan` does."""
    runs = read_sweep(file)
    names = [checked_name(run.name) for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"two runs of {file} would be jobs called {twice!r}: give their variants names that differ earlier"
        )
    return [
        make_plan(run.arguments, replace(options, name=name), project) for run, name in zip(runs, names, strict=True)
    ]


def _check(arguments: Sequence[str], options: Options) -> None:
    """Raise `ConfigError` for arguments and options that cannot be written into the files of a deployment."""
    if broken := next((text for text in arguments if not text.isprintable()), None):
        raise ConfigError(
            f"{broken!r} has a line break or a control character, which no manifest keeps: put it into a file"
        )
    if not IMAGE.fullmatch(options.image.rstrip("/")):
        raise ConfigError(f"--image {options.image!r} is no name of images: give one such as registry.example.org/team")
    check_arguments(arguments)
    named = (*options.secrets, *options.trainer_secrets)
    if bad := next((name for name in named if not VARIABLE.fullmatch(name)), None):
        raise ConfigError(f"--secret {bad!r} is no name of a variable: its value is never given here, only its name")


def _parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments, and return the given values by parameter. Raises `ConfigError` for arguments that `lightning train`
    would refuse or that a deployment sets."""
    app = typer.Typer()
    app.command()(train)
    try:
        context = typer.main.get_command(app).make_context("train", list(arguments))
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer may bring a click of its own
            raise
        raise ConfigError(f"lightning train would say: {error.format_message()}") from error
    given = {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    if ours := [f"--{name}" for name in OURS if name in given]:
        raise ConfigError(f"{', '.join(ours)}: a deployment sets that itself; leave it out")
    return given


def _rebuilt(given: dict[str, Any]) -> list[str]:
    """Return the arguments without the agent, whose code the trainer does not have."""
    flags = {"set_": "--set", "from_run": "--from", "train_agents": "--train-agents"}
    found: list[str] = []
    for name, value in given.items():
        if name != "agent":
            for one in value if isinstance(value, list | tuple) else [value]:
                found += [flags.get(name, f"--{name}"), str(one)]
    return found


def _runner_arguments(given: dict[str, Any]) -> list[str]:
    """Return the arguments for clients: those about how agents run."""
    found = ["--config", str(given["config"])] if "config" in given else []
    for text in given.get("set_", ()):
        if str(text).startswith("runner.") and not str(text).startswith("runner.concurrency"):
            found += ["--set", str(text)]
    return found


def _below(project: Path, path: Path, option: str) -> Path:
    if path.is_absolute() or not (project / path).resolve().is_relative_to(project.resolve()):
        raise ConfigError(f"{option} {path}: give a path below {project}, as it will be in the image")
    return path


def _extras(config: Config, engine: str) -> tuple[str, ...]:
    """Return the extras of lightning that the trainer needs."""
    trackers = {"tensorboard", "wandb", "mlflow", "trackio", "otel"} & set(names_of(config))
    used = {"verl"} & {engine} | {"ray"} & {config.policy_server.placement}
    return tuple(sorted({"torch", "vllm", "postgres", *trackers, *used}))


def checked_name(text: str) -> str:
    """Return a name for objects of a cluster: at most 40 small letters, digits and `-`. Raises `ConfigError` where none can be
    made."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    if not name or not name[0].isalpha():
        raise ConfigError(f"{text!r} makes no name for a deployment: give one with --name, such as --name writer")
    return name

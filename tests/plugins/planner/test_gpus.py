"""Sizes, memory and costs of models on GPUs: against published counts, by hand, and by what has to hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.config import LoraConfig
from lightning.config.plugin_settings import EngineConfig
from lightning.errors import ConfigError
from lightning_planner.cluster import GPUS, Assumptions, Cluster, assume, find_gpu
from lightning_planner.gateways import gateway_costs
from lightning_planner.memory import kv_tokens, layer_activations, memory, training_items, uncounted
from lightning_planner.shape import KNOWN, read_shape, shape_of
from lightning_planner.speed import server_costs, trainer_costs
from lightning_verl.config import VerlConfig

SMALL, LARGE = read_shape("Qwen/Qwen3-4B"), read_shape("Qwen/Qwen3-8B")
NODE = Cluster(GPUS["h100"], 8)
MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


def test_parameters_are_those_that_are_published() -> None:
    assert (SMALL.parameters, LARGE.parameters) == (4_022_468_096, 8_190_735_360)
    mixture = shape_of("Qwen/Qwen3-30B-A3B", MIXTURE)
    assert mixture.parameters == pytest.approx(30.5e9, rel=0.01)
    assert mixture.computed + mixture.embedding == pytest.approx(3.3e9, rel=0.02)
    assert SMALL.kv_elements * 2 == 147_456, "144 KiB a token"
    assert SMALL.adapters(16) == 33_030_144


def test_a_model_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["Qwen/Qwen3-4B"]))
    assert (
        read_shape(str(tmp_path)).parameters == read_shape(str(tmp_path / "config.json")).parameters == SMALL.parameters
    )


def test_a_model_that_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    odd = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 5}
    with pytest.raises(ConfigError, match=r"says nothing of .*intermediate_size"):
        shape_of("odd", odd)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "qwen2_moe", "gemma2", "gpt_oss", "qwen3_next", None])
def test_a_model_of_another_kind_is_refused_by_its_name(kind: str | None) -> None:
    with pytest.raises(ConfigError, match=rf"model_type {kind!r}.* it counts llama, mistral, mixtral, qwen2"):
        shape_of("other", {**KNOWN["Qwen/Qwen3-4B"], "model_type": kind})


@pytest.mark.parametrize(
    "part",
    [
        {"n_routed_experts": 256},
        {"shared_expert_intermediate_size": 5632},
        {"kv_lora_rank": 512},
        {"mlp_only_layers": [0, 1]},
        {"vision_config": {"hidden_size": 1024}},
        {"audio_config": {"hidden_size": 1024}},
        {"decoder_sparse_step": 2},
        {"layer_types": ["full_attention", "linear_attention"]},
    ],
)
def test_a_part_that_the_formulas_do_not_know_is_refused(part: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(part))):
        shape_of("odd", {**MIXTURE, **part})


def test_a_model_that_also_sees_is_refused_by_its_name() -> None:
    """Its decoder could be counted, its vision tower not."""
    decoder = {**KNOWN["Qwen/Qwen3-8B"], "model_type": "llama"}
    with pytest.raises(ConfigError, match="llava has model_type 'llava', whose parameters the planner cannot count"):
        shape_of("llava", {"model_type": "llava", "text_config": decoder, "vision_config": {"hidden_size": 1024}})


def test_what_such_a_configuration_says_of_nothing_is_counted() -> None:
    plain = {"mlp_only_layers": [], "decoder_sparse_step": 1, "layer_types": ["full_attention"] * 48}
    assert shape_of("m", {**MIXTURE, **plain}).parameters == shape_of("m", MIXTURE).parameters


def test_gpus_by_name_and_by_data_sheet() -> None:
    assert find_gpu("H200").memory == 141e9
    own = find_gpu("memory=48,tflops=362,bandwidth=0.864")
    assert (own.memory, own.flops, own.bandwidth) == (48e9, 362e12, 0.864e12)
    for wrong in ("b1000", "memory=48", "memory=48,tflops=x,bandwidth=1", "memory=0,tflops=1,bandwidth=1"):
        with pytest.raises(ConfigError, match="is no GPU"):
            find_gpu(wrong)


def test_assumptions_can_be_replaced() -> None:
    assert assume(["train_mfu=0.5"]).train_mfu == 0.5
    assert all(why for _, _, why in Assumptions().listed())
    for wrong, says in {
        "train_mfx=1": "did you mean 'train_mfu'",
        "train_mfu=a": "not a number",
        "files=0": "above 0",
    }.items():
        with pytest.raises(ConfigError, match=says):
            assume([wrong])


@pytest.mark.parametrize(
    ("division", "says"),
    [
        ((0,), "at least one"),
        ((8, 8), "has to train"),
        ((8, 0, 1, 9), "the cluster has 8.* product is 8 or less"),
        ((8, 0, 9), "the cluster has 8"),
        ((8, 4, 1, 1), "gpus_each = 1 cannot be dealt the GPUs: --serve-on gives them 4.* product is 4$"),
        ((8, 4, 1, 6), "--serve-on gives them 4"),
        ((8, 4, 3), "policy_server.replicas = 3 cannot be dealt the GPUs: --serve-on gives them 4"),
    ],
)
def test_a_cluster_has_to_be_divisible(division: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Cluster(GPUS["a100"], *division)


def test_who_serves_and_who_trains() -> None:
    assert (NODE.shared, NODE.training, NODE.server_gpus) == (True, 8, 8)
    assert Cluster(GPUS["h100"], 8, gpus_each=2).server_gpus == 2
    assert Cluster(GPUS["h100"], 8, serving=4, replicas=2).server_gpus == 2
    split = Cluster(GPUS["h100"], 16, serving=4)
    assert (split.shared, split.training, split.server_gpus) == (False, 12, 4)
    assert NODE.exchange == GPUS["h100"].link
    assert split.exchange == split.assumptions.network, "12 GPUs are more than one machine"


def named(items: list[object]) -> dict[str, float]:
    return {item.name: item.bytes for item in items}  # type: ignore[attr-defined]


def verl(engine: EngineConfig | None = None, **sharding: object) -> EngineConfig:
    return (engine or EngineConfig()).model_copy(update={"verl": VerlConfig.model_validate({"sharding": sharding})})


def state(items: dict[str, float]) -> float:
    return items["weights"] + items["gradients"] + items["AdamW's moments"]


def test_full_training_takes_sixteen_bytes_a_parameter_over_all_ranks() -> None:
    assert state(named(training_items(SMALL, 1, EngineConfig()))) == 16 * SMALL.parameters
    exchanged = verl(use_no_sync_for_gradient_accumulation=False)
    assert state(named(training_items(SMALL, 8, exchanged))) * 8 == 16 * SMALL.parameters


def test_gradients_of_many_ranks_are_whole_unless_verl_is_told_to_exchange_them() -> None:
    items = named(training_items(SMALL, 8, EngineConfig()))
    assert items["gradients"] == 4 * SMALL.parameters
    assert items["weights"] + items["AdamW's moments"] == 12 * SMALL.parameters / 8
    adapters = named(training_items(SMALL, 8, EngineConfig(lora=LoraConfig(rank=16))))
    assert adapters["gradients"] == 4 * SMALL.adapters(16)


def test_verl_keeps_weights_as_it_is_told_and_shares_them_among_as_many_ranks() -> None:
    small = named(training_items(SMALL, 8, verl(model_dtype="bf16", use_no_sync_for_gradient_accumulation=False)))
    assert state(small) * 8 == 8 * SMALL.parameters
    grouped = named(training_items(SMALL, 8, verl(fsdp_size=2, use_no_sync_for_gradient_accumulation=False)))
    assert state(grouped) * 2 == 16 * SMALL.parameters
    with pytest.raises(ConfigError, match="model_dtype = 'int8'"):
        training_items(SMALL, 8, verl(model_dtype="int8"))


def test_logits_take_as_much_for_a_long_row_as_for_a_short_one() -> None:
    """A row of 64k tokens of an 8 B model had 119 GB of them on verl's workers."""
    long = EngineConfig(tokens_per_microbatch=65_536)
    alone, many = (named(training_items(LARGE, ranks, long))["logits"] for ranks in (1, 8))
    assert alone == 1 << 28
    assert many - alone == (4 + 2) * LARGE.embedding, "the gradient of the output layer: its sum, and a part of it"
    assert named(training_items(LARGE, 8, EngineConfig()))["logits"] == many < 4.1e9
    adapters = long.model_copy(update={"lora": LoraConfig(rank=16)})
    assert named(training_items(LARGE, 8, adapters))["logits"] == alone


def test_adapters_alone_are_written_and_read_beside_the_base() -> None:
    whole, lora = EngineConfig(), EngineConfig(lora=LoraConfig(rank=16))
    costs, light = (trainer_costs(LARGE, NODE, engine, 1000.0) for engine in (whole, lora))
    files, adapters = NODE.assumptions.files, LARGE.adapters(16)
    assert (costs.export * files, costs.update * files) == pytest.approx((2 * LARGE.parameters, 4 * LARGE.parameters))
    assert light.export * files == pytest.approx(4 * adapters)
    assert light.update * files == pytest.approx(2 * LARGE.parameters + 8 * adapters)


def test_a_model_whose_whole_gradients_do_not_fit_is_said_not_to() -> None:
    shape, engine = shape_of("Qwen/Qwen3-30B-A3B", MIXTURE), EngineConfig(gradient_checkpointing=True)
    whole, exchanged = (
        memory(shape, Cluster(GPUS["h100"], 20, serving=4), one, 0.9)[0]
        for one in (engine, verl(engine, use_no_sync_for_gradient_accumulation=False))
    )
    assert not whole.fits, "30.5 B x 4 bytes of gradients alone are more than 80 GB"
    assert exchanged.fits


def test_megatron_is_refused_and_what_is_not_counted_is_said() -> None:
    engine = EngineConfig(verl=VerlConfig(strategy="megatron"))
    with pytest.raises(ConfigError, match=r"engine\.verl\.strategy = megatron.*--set engine\.verl\.strategy=fsdp2"):
        training_items(SMALL, 8, engine)
    assert uncounted(verl(fsdp_size=2, model_dtype="bf16"), 8) == []
    (note,) = uncounted(verl(param_offload=True), 8)
    assert "engine.verl.sharding.param_offload" in note
    assert uncounted(verl(param_offload=True), 1) == [], "the torch engine trains on one"


def test_float32_takes_more_than_bfloat16() -> None:
    half, full = EngineConfig(), EngineConfig(dtype="float32")
    for ranks in (1, 8):
        few, many = (named(training_items(SMALL, ranks, engine)) for engine in (half, full))
        assert many["activations"] > few["activations"] * 1.2
    assert many["layers at hand"] > few["layers at hand"], "gathered in float32"
    assert "layers at hand" not in named(training_items(SMALL, 1, full)), "no copies without autocast"
    assert "bfloat16 peak" in uncounted(full, 1)[0]
    assert "engine.epochs = 2" in uncounted(EngineConfig(epochs=2), 1)[0]


def test_lora_keeps_the_model_in_bfloat16_on_one_gpu_and_in_float32_on_more() -> None:
    learned, lora = SMALL.adapters(16), EngineConfig(lora=LoraConfig(rank=16))
    items = named(training_items(SMALL, 1, lora))
    assert items["weights"] == 2 * SMALL.parameters + 4 * learned
    assert items["gradients"] + items["AdamW's moments"] == 12 * learned
    assert "layers at hand" not in items
    assert named(training_items(SMALL, 8, lora))["weights"] == 4 * (SMALL.parameters + learned) / 8


def test_checkpointing_keeps_one_layer() -> None:
    engine = EngineConfig(tokens_per_microbatch=1000)
    kept = named(training_items(SMALL, 1, engine))["activations"]
    again = named(training_items(SMALL, 1, engine.model_copy(update={"gradient_checkpointing": True})))["activations"]
    assert kept == 1000 * 36 * layer_activations(SMALL, master=True)
    assert again == 1000 * (36 * 4 * 2560 + layer_activations(SMALL, master=True))


def test_each_kind_of_gpu_has_its_memory() -> None:
    (both,) = memory(SMALL, NODE, EngineConfig(gradient_checkpointing=True), 0.4)
    training, serving = memory(SMALL, replace(NODE, serving=4), EngineConfig(gradient_checkpointing=True), 0.9)
    assert {item.name for item in both.items} > {item.name for item in serving.items}
    assert serving.used == pytest.approx(0.9 * 80e9)
    assert both.fits
    assert training.fits
    (too_much,) = memory(LARGE, replace(NODE, gpus=1), EngineConfig(), 0.4)
    assert not too_much.fits
    assert too_much.used > 16 * LARGE.parameters


def test_the_cache_is_what_the_weights_leave() -> None:
    one = replace(NODE, gpus_each=1)
    room = kv_tokens(SMALL, one, 0.4)
    assert room * 147_456 < 0.4 * 80e9 - 2 * SMALL.parameters
    assert kv_tokens(SMALL, replace(NODE, gpus_each=2), 0.4) > 2 * room
    with pytest.raises(ConfigError, match=r"no room for a KV cache.*policy_server\.gpus_each"):
        server_costs(LARGE, one, 0.1, 1000.0)


def test_more_gpus_than_key_heads_keep_some_twice() -> None:
    eight, sixteen = (kv_tokens(SMALL, Cluster(GPUS["h100"], 32, serving=gpus), 0.4) for gpus in (8, 16))
    assert sixteen == pytest.approx(eight, rel=0.05)


def test_heads_that_vllm_cannot_divide_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"32 heads and 8 key heads .* among 6 GPUs: give --serve-on as one of 1, 2, 4$"
    ):
        server_costs(SMALL, Cluster(GPUS["h100"], 8, serving=6), 0.4, 1000.0)
    with pytest.raises(ConfigError, match=r"among 12 GPUs: give policy_server\.gpus_each"):
        server_costs(SMALL, Cluster(GPUS["h100"], 12), 0.4, 1000.0)


def test_decoding_reads_the_weights_and_training_computes_six_operations_a_parameter() -> None:
    assumed = Assumptions()
    server = server_costs(SMALL, replace(NODE, gpus_each=1), 0.4, context=0.0)
    assert server.token == pytest.approx(2 * SMALL.parameters / (3.35e12 * assumed.bandwidth_share) + 0.003)
    forward = 2 * SMALL.computed / (989e12 * assumed.prompt_mfu)
    assert (server.prompt_token, server.token_per_call) == pytest.approx((forward, forward + assumed.sequence_seconds))
    trainer = trainer_costs(SMALL, NODE, EngineConfig(), length=0.0)
    assert trainer.row_token == pytest.approx(6 * SMALL.computed / (8 * 989e12 * assumed.train_mfu))
    again = trainer_costs(SMALL, NODE, EngineConfig(gradient_checkpointing=True), length=0.0)
    assert again.row_token == pytest.approx(trainer.row_token * 4 / 3)
    wanted = trainer_costs(SMALL, NODE, EngineConfig(), length=0.0, forward_passes=2)
    assert wanted.row_token == pytest.approx(trainer.row_token * 5 / 3)
    tiny = trainer_costs(SMALL, replace(NODE, gpus=16), EngineConfig(tokens_per_microbatch=64), length=0.0)
    assert tiny.row_token > trainer.row_token, "so small micro-batches wait for the network"


def test_the_gpus_of_one_server_exchange_what_replicas_need_not() -> None:
    many, one = (server_costs(SMALL, replace(NODE, gpus_each=gpus), 0.4, context=0.0) for gpus in (4, 1))
    sums, assumed = 2 * SMALL.layers, Assumptions()
    weights = 2 * SMALL.parameters / (3.35e12 * assumed.bandwidth_share)
    assert many.token == pytest.approx(weights / 4 + 0.003 + sums * assumed.exchange_seconds)
    sent = sums * 2 * 3 / 4 * 2 * SMALL.hidden / GPUS["h100"].link
    assert many.prompt_token == pytest.approx(one.prompt_token / 4 + sent)
    assert many.token_per_call == pytest.approx(many.prompt_token + assumed.sequence_seconds)
    assert kv_tokens(SMALL, replace(NODE, gpus_each=4), 0.4) > 4 * kv_tokens(SMALL, replace(NODE, gpus_each=1), 0.4)


def test_the_gateways_numbers_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text().partition("## Gateways in processes")[2]
    rows = {row[0]: row[1:] for line in page.splitlines() if (row := [part.strip() for part in line.split("|")[1:-1]])}
    measured = [fmean(map(float, cell.split(","))) for cell in rows["CPU of all gateways for a call, ms"]]
    assert [1000 * gateway_costs(processes, 1000).call for processes in (0, 1, 2, 4)] == pytest.approx(measured)
    by_prompt = [float(rows[tokens][1]) for tokens in ("1,000", "8,000", "64,000")]
    longer = [gateway_costs(0, prompt).call / gateway_costs(0, 1000).call for prompt in (1000, 8000, 64000)]
    assert longer == pytest.approx([each / by_prompt[0] for each in by_prompt])
    assert [gateway_costs(processes, 1).processes for processes in (0, 1, 4)] == [1, 1, 4]
    assert gateway_costs(4, 1000).most == pytest.approx(4000 / measured[3])


@settings(max_examples=8, deadline=None)
@given(
    ranks=st.sampled_from([2, 4, 8, 16, 32]), tokens=st.integers(256, 65536), context=st.floats(1, 20000),
    share=st.floats(0.3, 0.9),
)  # fmt: skip
def test_more_is_never_less(ranks: int, tokens: int, context: float, share: float) -> None:
    few, many = Cluster(GPUS["h100"], ranks), Cluster(GPUS["h100"], 2 * ranks)
    engine = EngineConfig(tokens_per_microbatch=tokens)
    assert memory(SMALL, many, engine, share)[0].used < memory(SMALL, few, engine, share)[0].used
    assert memory(LARGE, few, engine, share)[0].used > memory(SMALL, few, engine, share)[0].used
    assert (
        server_costs(SMALL, few, share, context * 2).token_per_call
        > server_costs(SMALL, few, share, context).token_per_call
    )
    assert trainer_costs(LARGE, few, engine, 100.0).row_token > trainer_costs(SMALL, few, engine, 100.0).row_token
    h200 = Cluster(GPUS["h200"], ranks)
    assert kv_tokens(SMALL, h200, share) > kv_tokens(SMALL, few, share)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("master", "size"), [(True, 2), (False, 2), (False, 4)])
def test_activations_are_the_tensors_that_autograd_saves(kind: str, master: bool, size: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    shape = {
        "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 384,
        "vocab_size": 100, "tie_word_embeddings": True,
    }  # fmt: skip

    def saved(layers: int, tokens: int = 333) -> float:
        config = AutoConfig.for_model(kind, num_hidden_layers=layers, attn_implementation="sdpa", **shape)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if master or size == 4 else torch.bfloat16
        ).train()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        copies = {parameter.numel() * 2 for parameter in model.parameters() if parameter.ndim == 2} if master else set()
        seen: dict[int, tuple[int, torch.Tensor]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and storage.nbytes() not in copies:
                seen[storage.data_ptr()] = storage.nbytes(), tensor  # alive, so that its address stays its own
            return tensor

        autocast = torch.autocast("cpu", torch.bfloat16, enabled=master)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
            model.model(torch.randint(0, 100, (1, tokens)))
        return sum(size for size, _ in seen.values()) / tokens

    measured = (saved(3) - saved(1)) / 2
    counted = shape_of(kind, {**shape, "model_type": kind, "num_hidden_layers": 1})
    assert layer_activations(counted, master=master, size=size) == pytest.approx(measured, rel=0.005)

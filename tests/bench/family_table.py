"""What the torch engine makes of a tiny random model of each family, with every dropout, jitter, cap and long rope on.

The right values are those of `transformers` alone: evaluation, eager attention, one row at a time, positions as vLLM scales
them with a `max_model_len` of 64. A family is right where the engine's logprobs are these, read and in the gradient pass (with
`gradient_checkpointing`), alone and beside a longer row; it is refused where the engine says why it cannot be trained; else it
is wrong, by so many nats.

    python tests/bench/family_table.py [FAMILY ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.batch.sample import Sample, TokenSpan
from lightning.errors import LightningError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB, CONTEXT, ORIGINAL = 320, 64, 16
SHORT, LONG = 12, 40
"""Tokens of the two rows; the second one is longer than the context before scaling."""
RIGHT = 1e-3
"""Nats that rounding may explain."""
NOISE, CAP = 0.3, 2.0

SIZES: dict[str, object] = {
    "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.15, "init_std": 0.15,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "embedding_dim": 64, "dim": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 128, "ffn_dim": 128, "decoder_ffn_dim": 128, "n_inner": 128, "d_ff": 128, "dff": 128,
    "ffn_hidden_size": 128,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "attention_heads": 2, "decoder_attention_heads": 2,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 32, "rotary_dim": 16, "lru_width": 64, "attention_head_dim": 64,
    "max_position_embeddings": CONTEXT, "n_positions": CONTEXT, "max_seq_len": CONTEXT, "max_sequence_length": CONTEXT,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "top_k_experts": 2, "moe_k": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "num_dense_layers": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_channels": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_ssm": 128, "mamba_expand": 2, "state_size": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "mamba_dt_rank": 4, "time_step_rank": 4,
    "mamba_n_groups": 1, "n_mamba_heads": 2, "mamba_headdim": 32, "n_groups": 1, "chunk_size": 16, "mamba_chunk_size": 16,
    "sliding_window": 8, "attention_window_size": 8, "keep_window_size": 8, "use_mamba_kernels": False,
}  # fmt: skip
"""Values of whatever a configuration has of these."""
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, "rope_theta": 10000.0}
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [2.0 + 0.5 * at for at in range(16)]}


@dataclass(frozen=True)
class Case:
    """A family as the table has it: its `model_type` and what its configuration needs beside `SIZES`. `growing` positions are
    scaled by length: the right values are those of a row as long as the context."""

    kind: str
    more: dict[str, object] = field(default_factory=dict)
    growing: bool = False


PLAIN = """
afmoe apertus arcee bamba biogpt bitnet bloom codegen cohere cohere2 cohere2_moe ctrl cwm dbrx deepseek_v2 deepseek_v3
diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2
gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jais2 jamba
jetmoe lfm2 lfm2_moe llama llama4_text longcat_flash mamba mamba2 minimax minimax_m2 ministral ministral3 mistral
mixtral modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon
phi phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text recurrent_gemma rwkv seed_oss smollm3 solar_open
stablelm starcoder2 vaultgemma xglm xlstm youtu
"""
CASES: dict[str, Case] = {name: Case(name) for name in PLAIN.split()}
CASES |= {
    "phi3": Case("phi3"),
    "phi3 longrope": Case(
        "phi3", {"rope_parameters": LONGROPE | FACTORS, "original_max_position_embeddings": ORIGINAL}, growing=True
    ),
    "phimoe longrope": Case(
        "phimoe",
        {"rope_parameters": LONGROPE | FACTORS | {"short_mscale": 1.1, "long_mscale": 1.2, "factor": 4.0}},
        growing=True,
    ),
    "llama longrope": Case("llama", {"rope_parameters": LONGROPE | FACTORS | {"factor": 4.0}}, growing=True),
    "llama dynamic": Case(
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
            "max_position_embeddings": ORIGINAL,
        },
        growing=True,
    ),
}
LATENT: dict[str, object] = {"head_dim": 16}
OWN: dict[str, dict[str, object]] = {
    "codegen": {"n_embd": 128, "num_attention_heads": 4},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "attn_pdrop": NOISE, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 64, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": NOISE,
        },
    },
    "deepseek_v3": LATENT,
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "intermediate_size": [128, 128],
        "activation_sparsity_pattern": [0.0, 0.0], "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "glm4_moe_lite": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 4},
    "rwkv": {"rescale_every": 1},
    "youtu": LATENT,
}  # fmt: skip
"""What a family needs beside the sizes, by `model_type`."""


def configuration(case: Case) -> Any:
    """A tiny configuration with every number of noise and every cap that the family has."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(case.kind)
    settable = {
        name for name in SIZES if hasattr(usual, name) and not isinstance(getattr(type(usual), name, None), property)
    }
    given = {name: value for name, value in SIZES.items() if name in settable} | OWN.get(case.kind, {})
    for name, value in vars(usual).items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and re.search("drop|jitter|noise", name):
            given[name] = NOISE
        elif re.search("att.*cap", name) and not isinstance(value, bool):
            given[name] = CAP
        elif re.search("soft_?cap", name) and number:
            given[name] = 5.0
    return AutoConfig.for_model(case.kind, **(given | case.more))


def row(length: int, logprobs: np.ndarray) -> Sample:
    """A row whose second half is trained, with the sampler's logprobs."""
    ids = np.random.default_rng(length).integers(3, VOCAB, length).astype(np.int32)
    trained = np.arange(length) >= length // 2
    return Sample(
        ids,
        np.where(trained, 0.1, 0).astype(np.float32),
        trained.astype(np.float32),
        np.where(trained, logprobs, np.nan).astype(np.float32),
        np.where(trained, 0, -1).astype(np.int32),
        (TokenSpan(f"r{length}", 1, 0, length // 2, length),),
    )


def right_values(model: PreTrainedModel, ids: np.ndarray, *, growing: bool) -> np.ndarray:
    """Logprobs (T,) of a row by itself, followed by others up to the context's end where positions grow with it."""
    import torch

    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    padded = torch.nn.functional.pad(tokens, (0, CONTEXT - len(ids)), value=3) if growing else tokens
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=padded, use_cache=False).logits[0, : len(ids)].float(), -1)
    found: np.ndarray = table[:-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    return np.append(np.float32(np.nan), found)


def try_family(case: Case, folder: Path) -> dict[str, object]:
    """Make it, open it, take a step; what came of it."""
    import torch
    from lightning.engines.protocol import OptimizerConfig
    from lightning.engines.torch.engine import TorchEngine
    from lightning.losses.correction import NO_CORRECTION
    from lightning.losses.policy_gradient import ClippedPolicyGradient
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = configuration(case)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    blank = [row(length, np.zeros(length)) for length in (SHORT, LONG)]
    rows = [row(len(one), right_values(reference, one.ids, growing=case.growing)) for one in blank]
    engine = TorchEngine(device="cpu", gradient_checkpointing=True, step="linear", max_model_len=CONTEXT)
    began = time.monotonic()
    try:
        engine.open(folder, OptimizerConfig(lr=1e-9), seed=0)
    except LightningError as error:
        return {"refused": str(error).replace(str(folder), "FOLDER")}
    opened = time.monotonic() - began
    wanted = [one.logprobs[len(one) // 2 :] for one in rows]
    read = [one[len(one) // 2 :] for one in engine.logprobs(rows)]
    read.append(engine.logprobs(rows[:1])[0][SHORT // 2 :])  # alone, after a longer row
    gap = max(float(np.abs(one - other).max()) for one, other in zip(read, [*wanted, wanted[0]], strict=True))
    step = engine.step(rows, ClippedPolicyGradient(correction=NO_CORRECTION)).metrics["max_logprob_gap"]
    attention = engine._opened().model.config.get_text_config()._attn_implementation
    engine.close()
    return {"gap": round(max(gap, step), 6), "open_seconds": round(opened, 2), "attention": attention}


def verdict(found: dict[str, Any]) -> str:
    """`right`, `refused`, `wrong`, or `not made` where `transformers` alone does not get that far."""
    if "gap" in found:
        return "right" if found["gap"] < RIGHT else "wrong"
    return "refused" if "refused" in found else "not made"


def main(names: list[str], file: Path | None) -> int:
    """Try all; returns how many are wrong."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    table: dict[str, dict[str, object]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = try_family(CASES[name], Path(folder))
            except Exception as error:  # some families need more than this file knows
                found = {"failed": f"{type(error).__name__}: {error}"[:300]}
        table[name] = {"is": verdict(found), **found}
        sys.stdout.write(f"{name}: {json.dumps(table[name])}\n")
        sys.stdout.flush()
    counts = {
        kind: sum(found["is"] == kind for found in table.values()) for kind in ("right", "refused", "wrong", "not made")
    }
    sys.stdout.write(f"{json.dumps(counts)}\n")
    if file is not None:
        file.write_text(json.dumps(table, indent=1) + "\n")
    return counts["wrong"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="none: all")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    sys.exit(min(main(given.families or list(CASES), given.json), 1))

"""Families of tiny models, laid out as published checkpoints are, with vision towers, MTP heads, FP8 scales and old buffers.

The invariant: what `transformers` would leave out when it saves such a model again is in the folder of a family, under the
names that its publishers use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from lightning.testing.tiny_models import CHAT_TEMPLATE, END_OF_TEXT, IM_END, make_tiny_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Family = Literal["deepseek_v3", "fp8", "gemma3", "gpt2", "gpt_oss", "llama2", "qwen3_5", "qwen3_next"]
FAMILIES: tuple[Family, ...] = get_args(Family)
FP8_BLOCK = 32
"""Rows and columns that share a scale; published checkpoints have 128."""
_FP8_MAX = 448.0
VOCAB = 320

_TEXT: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "head_dim": 32,
}
_EXPERTS: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,  # as published; the only size that vLLM's CPU kernel takes
    "linear_value_head_dim": 128,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25}
_VISION: dict[str, object] = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 8}


_RECIPES: dict[Family, tuple[str, str, dict[str, object]]] = {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _TEXT
        | {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
        | {"first_k_dense_replace": 1, "num_key_value_heads": 2, "head_dim": 64, "num_nextn_predict_layers": 1}
        | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # vLLM has the router's bias for these alone
    ),
    "fp8": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _TEXT | _EXPERTS),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": _TEXT
            | {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 16,
                "query_pre_attn_scalar": 32,
            },
            "vision_config": _VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16},
            "mm_tokens_per_image": 4,
            **{f"{name}_token_index": VOCAB - place for place, name in enumerate(("image", "boi", "eoi"), 1)},
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_positions": 512, "n_embd": 64, "n_layer": 2, "n_head": 2, "initializer_range": 0.15},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "tie_word_embeddings": False},
    ),
    "llama2": ("LlamaForCausalLM", "LlamaConfig", _TEXT),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {
            "text_config": _TEXT | _LINEAR | {"head_dim": 64, "rope_parameters": _MROPE},
            "vision_config": _VISION
            | {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
            **{
                f"{name}_token_id": VOCAB - place
                for place, name in enumerate(("image", "video", "vision_start", "vision_end"), 1)
            },
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        _TEXT | _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 32},
    ),
}
"""The names of the model's and of the configuration's class, and the configuration's values."""


def make_tiny_family(folder: Path, family: Family, *, seed: int = 0) -> Path:
    """Write a random model of the family to `folder`, with a tokenizer, and return it. Torch's generator is left as it was."""
    import torch
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tiny_tokenizer(VOCAB),
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
    )
    of_class, of_config, values = _RECIPES[family]
    config = getattr(transformers, of_config)(**values)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.eos_token_id, part.pad_token_id, part.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, of_class)(config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        change = _AS_PUBLISHED.get(family)
        if change is not None:
            _rewrite(folder, change)
    return folder


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, object]], None]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _with_mtp(tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    """The head that predicts one token more, which `transformers` leaves out."""
    import torch

    tensors["mtp.fc.weight"] = torch.randn(64, 128)
    tensors["mtp.norm.weight"] = torch.randn(64)


def _with_next_layer(tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    """DeepSeek's head stands behind the last layer, as if it were another one."""
    import torch

    last = f"model.layers.{_TEXT['num_hidden_layers']}"
    tensors[f"{last}.eh_proj.weight"] = torch.randn(64, 128)
    tensors[f"{last}.enorm.weight"] = torch.randn(64)


def _with_buffers(tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    """The frequencies that Llama 2's checkpoints store, and a configuration as old as they are."""
    import torch

    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.arange(16) / 16
    for new in ("rope_parameters", "head_dim", "attention_bias", "mlp_bias"):
        config.pop(new, None)
    config["torch_dtype"] = config.pop("dtype", "float32")
    config["transformers_version"] = "4.31.0"


def _bare(tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    """GPT-2's checkpoints name the trunk's tensors without a prefix, and store its causal masks."""
    import torch

    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, 512, 512))


def _in_fp8(tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    """Fine-grained FP8: one scale for each block of the layers' matrices."""
    import torch

    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
        scale = blocks.abs().amax((1, 3), keepdim=True) / _FP8_MAX
        tensors[name] = (blocks / scale).to(torch.float8_e4m3fn).reshape(rows, columns)
        tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0].float()
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }


_AS_PUBLISHED: dict[Family, Callable[[dict[str, torch.Tensor], dict[str, object]], None]] = {
    "deepseek_v3": _with_next_layer,
    "fp8": _in_fp8,
    "gpt2": _bare,
    "llama2": _with_buffers,
    "qwen3_5": _with_mtp,
    "qwen3_next": _with_mtp,
}

"""A tiny Qwen3, in the form `transformers` and vLLM load: its configuration, its first weights, its folder.

The invariant: everything is float32 and follows from the seed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HEAD_DIM = 32
"""The smallest head that vLLM's attention on a CPU was seen to take."""


def tiny_config(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int = 64, layers: int = 2, heads: int = 4, context: int = 2048
) -> Qwen3Config:
    """Two layers are the fewest that can copy from the context (induction), and the quickest to learn it.

    Embeddings are not tied: vLLM keeps a packed copy of a tied output layer on a CPU, which an update in place misses.
    """
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def build(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """A model with fresh weights: matrices at half of 1/sqrt(fan-in), what writes into the residual stream smaller.

    The output layer starts as a copy of the embeddings, so that repeating a token that was attended to need not be learnt.
    """
    model = Qwen3ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    scale = 0.5 / math.sqrt(config.hidden_size)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim < 2:
                continue
            deviation = scale
            if "embed_tokens" in name or "lm_head" in name:
                deviation = 0.02
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation = scale / math.sqrt(2 * config.num_hidden_layers)
            weight.normal_(0.0, deviation, generator=generator)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder: config, generation config, safetensors, tokenizer, chat template."""
    # Plain sampling unless a request says otherwise.
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

"""Model folders small enough for a unit test: real architectures, random weights, made in a second without a download; and
families laid out as published checkpoints are, with vision towers, MTP heads, FP8 scales and old buffers.

The invariant: every id below `vocab` is a token of the tokenizer, so whatever such a model samples can be decoded, and one
seed always gives one set of weights. What `transformers` would leave out when it saves such a model again is in the folder
of a family, under the names that its publishers use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig, PreTrainedModel

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Ordinary tokens (not special): vLLM's hermes parser must see them in the text, and find them in the vocabulary."""

HEAD_DIM = 32
"""vLLM's CPU attention serves head sizes 32 and 64."""

CHAT_TEMPLATE = """\
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- if system or tools -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if tools -%}
{{- '\\n' if system else '' -}}{{- '<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + ((tool.function or tool) | tojson) -}}{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in rest -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '\\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}"""
"""ChatML with hermes tool calls. A conversation rendered up to turn t is a prefix of the same one up to turn t + 1."""

_CORPUS = (
    "The agent asks the model what to do next and the model answers with a call of a tool.",
    "What is 12 + 30? It is 42. What is 7 * 6? It is also 42. Then add 1, so the total is 43.",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 + 30"}}\n</tool_call>',
    '{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}',
    "system\nYou are a helpful assistant.\nuser\nPlease write the number.\nassistant\nThe answer is 42.\n",
)


def make_tiny_model(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 320,
    architecture: Literal["qwen2", "qwen3", "llama"] = "qwen3",
) -> Path:
    """Write config.json, tokenizer and `model.safetensors` (float32) of a random causal LM to `folder`; return it.

    `hidden` must be a multiple of 64 (heads of 32, two for every key/value head). `vocab` counts all tokens, at least
    263 (bytes, ChatML, tools). Weights are drawn wide enough that the model clearly prefers some tokens over others: a
    test of logprobs on a near-uniform model would pass with the wrong weights. Torch's generator is left as it was.

    Raises ValueError for sizes that cannot be built.
    """
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    if hidden % (2 * HEAD_DIM):
        raise ValueError(f"hidden={hidden} is not a multiple of {2 * HEAD_DIM}; heads have {HEAD_DIM} dimensions")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_tiny_tokenizer(vocab),
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
    )
    config = _model_config(architecture, tied=tied, hidden=hidden, layers=layers, vocab=vocab)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.bos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_tokenizer(vocab: int = 320) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab` tokens: any text can be encoded, and any ids can be decoded."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(SPECIAL_TOKENS) + len(TOOL_TOKENS)
    if vocab < least:
        raise ValueError(f"vocab={vocab} has no room for the bytes, ChatML and tool tokens; use at least {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(TOOL_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    # The corpus has only so many merges; a larger vocabulary is filled up with tokens that no text contains by chance.
    spare = vocab - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<|spare_{i}|>", special=False, normalized=False) for i in range(spare)])
    return tokenizer


def _model_config(
    architecture: Literal["qwen2", "qwen3", "llama"], *, tied: bool, hidden: int, layers: int, vocab: int
) -> PretrainedConfig:
    from transformers import AutoConfig

    heads = hidden // HEAD_DIM
    sizes: dict[str, int] = {"head_dim": HEAD_DIM} if architecture != "qwen2" else {}
    return AutoConfig.for_model(
        architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        use_cache=True,
        **sizes,
    )


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

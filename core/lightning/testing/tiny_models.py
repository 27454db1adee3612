"""Model folders small enough for a unit test: real architectures, random weights, made in a second without a download.

The invariant: every id below `vocab` is a token of the tokenizer, so whatever such a model samples can be decoded, and one
seed always gives one set of weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

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

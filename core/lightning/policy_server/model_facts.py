"""What a model folder says of the model that vLLM is to serve (its size, its context, its kind, its chat template), and
which of vLLM's parsers of tool calls and of reasoning follow from that.

The invariant: nothing is loaded but JSON, safetensors headers and the template's text; what a folder does not say is None or
empty, never guessed. A parser is chosen only where the folder's own chat template writes what the parser reads, so that none is
switched on that could only fail; every name here is registered in the vLLM that is supported (held by a test).

Source of the parsers: vLLM's documentation ("Tool Calling", "Reasoning Outputs") and the model lists of its parsers' own
modules, `vllm/tool_parsers` and `vllm/reasoning`, release 0.31. Left out on purpose: parsers that need packages or tokenizer
modes which vLLM does not bring by default (Cohere's, Mistral's of reasoning); name those by hand.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning.errors import PolicyServerError
from lightning.policy_server.model_folder import DTYPE_BYTES, folder_tensors

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where a model of several kinds of input keeps the configuration of its language model."""
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
"""Entries of `layer_types` (`layers_block_type`) that keep keys and values for each token."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model folder. `name` is that of the folder and what the configuration calls the model."""

    name: str
    model_type: str
    parameters: int
    bytes: int
    """Of the checkpoint's tensors."""
    kv_elements: int | None
    """Numbers that the KV cache keeps for a token: 2 x layers x key heads x their size (arXiv 2309.06180); with a latent of
    keys and values (arXiv 2405.04434) its rank and the shared rotary key, a layer."""
    context: int | None
    """`max_position_embeddings` or what the family calls it, before any scaling."""
    plain_attention: bool
    """Every layer has keys and values of its own for each token: no latent, no state-space or linear layers."""
    why_bfloat16: str
    """What vLLM serves on a CPU in bfloat16 and not in float32; empty: nothing in it."""
    template: str
    """All chat templates of the folder, one after another; empty without one."""
    vocabulary: str
    """The text of tokenizer.json; empty without one."""

    @property
    def knows_tools(self) -> bool:
        """Whether a chat template shows tools to the model."""
        return "tools" in self.template

    def has_token(self, token: str) -> bool:
        """Whether the tokenizer has it as one token."""
        return json.dumps(token, ensure_ascii=False) in self.vocabulary


def read_facts(folder: Path) -> ModelFacts:
    """The facts of a complete model folder (see `check_model_folder`). Raises PolicyServerError for one that cannot be read."""
    config = _object(folder / "config.json")
    text = next((config[name] for name in TEXT_PARTS if isinstance(config.get(name), dict)), config)
    assert isinstance(text, dict)  # for the type checker: chosen so above
    tensors = folder_tensors(folder).values()
    latent = isinstance(text.get("kv_lora_rank"), int)
    kinds = text.get("layer_types") or text.get("layers_block_type") or []
    other = [kind for kind in kinds if kind not in ATTENTION_LAYERS]
    linear = "linear_attention" in kinds or any(key.startswith("linear_") for key in text)
    states = bool(other) or linear or any("mamba" in key or key.startswith("ssm_") for key in text)
    tokenizer = folder / "tokenizer.json"
    return ModelFacts(
        name=" ".join(filter(None, (_name(folder), str(config.get("_name_or_path", ""))))),
        model_type=str(config.get("model_type", "")),
        parameters=sum(math.prod(spec.shape) for spec in tensors),
        bytes=sum(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in tensors),
        kv_elements=_kv_elements(text, len(kinds) - len(other)),
        context=_integer(text, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
        plain_attention=not latent and not states,
        why_bfloat16="linear attention" if linear else "FP8 weights" if _is_fp8(config, text) else "",
        template="\n".join(_templates(folder)),
        vocabulary=tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else "",
    )


def _is_fp8(*configs: Mapping[str, object]) -> bool:
    quantised = (config.get("quantization_config") for config in configs)
    return any(isinstance(own, dict) and own.get("quant_method") == "fp8" for own in quantised)


def _name(folder: Path) -> str:
    """The folder's; of one in the hub's cache (`models--OWNER--NAME/snapshots/HASH`) the model's."""
    return next((part for part in folder.parts[-3:-1] if part.startswith("models--")), folder.name)


def _kv_elements(text: Mapping[str, object], attending: int) -> int | None:
    """See `ModelFacts.kv_elements`; `attending` layers have such a cache, 0: all."""
    layers = attending or _integer(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    rank, rotary = _integer(text, "kv_lora_rank"), _integer(text, "qk_rope_head_dim")
    if layers and rank and rotary:
        return layers * (rank + rotary)
    heads, hidden = _integer(text, "num_attention_heads", "n_head", "n_heads"), _integer(text, "hidden_size", "n_embd")
    size = _integer(text, "head_dim") or (hidden // heads if heads and hidden else None)
    key_heads = _integer(text, "num_key_value_heads") or heads
    return 2 * layers * key_heads * size if layers and key_heads and size else None


def _templates(folder: Path) -> Iterator[str]:
    """The chat templates of a folder, wherever its tokenizer keeps them."""
    for file in (folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))):
        if file.is_file():
            yield file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = folder / name
        found = _object(file).get("chat_template") if file.is_file() else None
        for template in found if isinstance(found, list) else [found]:
            text = template.get("template") if isinstance(template, dict) else template
            if isinstance(text, str):
                yield text


def _integer(values: Mapping[str, object], *names: str) -> int | None:
    """The first of these that is a number."""
    return next((value for name in names if isinstance(value := values.get(name), int) and value > 0), None)


def _object(file: Path) -> Mapping[str, object]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise PolicyServerError(f"cannot read {file}: {error}; save the model again") from error
    return value if isinstance(value, dict) else {}


THINK = "<think>"


class Parsers(NamedTuple):
    """Names of vLLM's; empty: none. `why` says what decided."""

    tool: str
    reasoning: str
    why: str


@dataclass(frozen=True, slots=True)
class Family:
    """Models of these values of `model_type` (none: of any) where `marker` is found in the template and `hint` in the name
    (regular expressions)."""

    kinds: tuple[str, ...]
    tool: str = ""
    reasoning: str = ""
    marker: str = ""
    hint: str = ""
    thinks: str = THINK
    """Text without which a template asks for no reasoning; empty: the family always reasons."""

    def has(self, facts: ModelFacts) -> bool:
        """Whether a model is one of them."""
        kind = not self.kinds or facts.model_type in self.kinds
        named = re.search(self.hint, facts.name, re.IGNORECASE) is not None
        return kind and named and re.search(self.marker, facts.template) is not None


QWEN3 = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
DEEPSEEK = ("deepseek_v3", "deepseek_v2")
DEEPSEEK_CALLS = "tool\u2581calls\u2581begin"
"""In DeepSeek's templates for tools. With its parser vLLM refuses every request to a model whose tokenizer lacks the token."""
FAMILIES = (
    Family(("gpt_oss",), "openai", "openai_gptoss", thinks=""),
    Family(("kimi_k2", "kimi_k25"), "kimi_k2", "kimi_k2"),
    Family(DEEPSEEK, "gigachat3", hint="gigachat"),
    Family(DEEPSEEK, "kimi_k2", "kimi_k2", marker=r"<\|tool_calls_section_begin\|>"),
    Family(DEEPSEEK, "deepseek_v31", "deepseek_v3", marker=rf"(?s)(?=.*thinking)(?=.*{DEEPSEEK_CALLS})"),
    Family(DEEPSEEK, "deepseek_v3", "deepseek_r1", marker=DEEPSEEK_CALLS, hint=r"\br1\b"),
    Family(DEEPSEEK, "deepseek_v3", marker=DEEPSEEK_CALLS),
    Family(DEEPSEEK, "", "deepseek_v3", marker="thinking"),
    Family(DEEPSEEK, "", "deepseek_r1", hint=r"\br1\b"),
    Family(("deepseek_v32",), "deepseek_v32", "deepseek_v3", thinks=""),
    Family(("deepseek_v4",), "deepseek_v4", "deepseek_v4", thinks=""),
    Family(("glm4_moe_lite",), "glm47", "glm47"),
    Family(("glm4_moe", "glm4v_moe"), "glm47", "glm47", hint=r"4[._-]?7"),
    Family(("glm4_moe", "glm4v_moe"), "glm45", "glm45"),
    Family(("minimax_m2",), "minimax_m2", "minimax_m2_append_think"),
    Family(("minimax_m3",), "minimax_m3", "minimax_m3"),
    Family(("mimo", "mimo_v2_flash"), "mimo", "mimo", marker="<function="),
    Family(("nemotron_h",), "qwen3_coder", "nemotron_v3", marker="<function="),
    Family(QWEN3, "qwen3_coder", "qwen3", marker="<function="),
    Family(QWEN3, "hermes", "qwen3", marker="<tool_call>"),
    Family(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"), "hermes", "deepseek_r1", marker="<tool_call>"),
    Family(("qwen2", "qwen3", "llama"), "", "deepseek_r1", marker="<\uff5cAssistant\uff5c>"),  # R1, distilled
    Family(("llama4",), "llama4_pythonic"),
    Family(("llama", "qwen2"), "xlam", hint="xlam"),
    Family(("llama", "mllama"), "llama3_json", marker="Environment: ipython"),
    Family(("mistral", "mixtral", "mistral3", "ministral3"), "mistral", marker=r"\[TOOL_CALLS\]"),
    Family(("granitemoehybrid",), "granite4"),
    Family(("granite", "granitemoe"), "granite4", marker="<tool_call>"),
    Family(("granite", "granitemoe"), "granite", "granite", thinks="thinking"),
    Family(("gpt_bigcode",), "granite-20b-fc", hint="granite"),
    Family(("hunyuan_v1_moe",), "hunyuan_a13b", "hunyuan_a13b"),
    Family(("phi3", "phi4mm"), "phi4_mini_json", marker=r"<\|tool\|>"),
    Family(("internlm2",), "internlm", marker=r"<\|plugin\|>"),
    Family(("gemma4", "gemma4_text"), "gemma4", "gemma4", thinks="thinking"),
    Family(("gemma3", "gemma3_text"), "functiongemma", marker="<start_function_call>"),
    Family(("jamba",), "jamba"),
    Family(("lfm2", "lfm2_moe"), "lfm2"),
    Family(("longcat_flash",), "longcat"),
    Family(("apertus",), "apertus"),
    Family(("olmo3",), "olmo3", "olmo3"),
    Family(("seed_oss",), "seed_oss", "seed_oss", thinks="<seed:think>"),
    Family(("step3", "step3_text", "step3_vl"), "step3", "step3"),
    Family(("step3p5",), "step3p5", "step3p5"),
    Family(("ernie4_5_moe",), "ernie45", "ernie45"),
    Family((), "hermes", marker=r'<tool_call>(\\n|\s)*\{"name"'),  # whoever writes a call as the Hermes models do
)
"""The first that fits decides."""


def parsers_for(facts: ModelFacts) -> Parsers:
    """vLLM's parsers for a model."""
    family = next((family for family in FAMILIES if family.has(facts)), None)
    reasoning = family.reasoning if family is not None and _reasons(family, facts) else ""
    if not facts.knows_tools:
        return Parsers("", reasoning, "the chat template knows no tools")
    if family is None or not family.tool:
        return Parsers(
            "",
            reasoning,
            f"no parser is known for model_type {facts.model_type!r}: vLLM refuses `tools` until you name one",
        )
    return Parsers(family.tool, reasoning, f"model_type {facts.model_type!r} and its chat template")


def _reasons(family: Family, facts: ModelFacts) -> bool:
    """Whether its parser of reasoning would find what it looks for: vLLM does not start where the token is missing."""
    if family.thinks == THINK:
        return THINK in facts.template and facts.has_token(THINK)
    return family.thinks in facts.template

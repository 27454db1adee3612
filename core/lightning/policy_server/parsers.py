"""vLLM's parsers of tool calls and of reasoning, by the family of a model.

The invariant: a parser is chosen only where the model's own chat template writes what the parser reads, so that no parser is
switched on that could only fail. Every name here is registered in the vLLM that is supported (a test checks that). The names
come from vLLM's documentation ("Tool Calling", "Reasoning Outputs") and the model lists of its parsers' own modules,
`vllm/tool_parsers` and `vllm/reasoning`, release 0.31. Left out on purpose are parsers that need packages or tokenizer modes
which vLLM does not bring by default (Cohere's, Mistral's of reasoning); name those by hand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from lightning.policy_server.model_folder import ModelFacts

THINK = "<think>"


class Parsers(NamedTuple):
    """The names of vLLM's parsers for a model; an empty name means no parser. `why` is the reason for `tool`."""

    tool: str
    reasoning: str
    why: str


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose `model_type` is one of `kinds` (empty: any), with `marker` in the chat template and `hint` in the name (both
    are regular expressions), and the names of their parsers."""

    kinds: tuple[str, ...]
    tool: str = ""
    reasoning: str = ""
    marker: str = ""
    hint: str = ""
    thinks: str = THINK
    """Text without which a template asks for no reasoning; empty if the family always reasons."""

    def has(self, facts: ModelFacts) -> bool:
        """Whether a model belongs to this family."""
        kind = not self.kinds or facts.model_type in self.kinds
        named = re.search(self.hint, facts.name, re.IGNORECASE) is not None
        return kind and named and re.search(self.marker, facts.template) is not None


QWEN3 = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
DEEPSEEK = ("deepseek_v3", "deepseek_v2")
DEEPSEEK_CALLS = "tool\u2581calls\u2581begin"
"""Stands in DeepSeek's templates for tools. With its parser vLLM refuses every request to a model whose tokenizer lacks the
token."""
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
    Family((), "hermes", marker=r'<tool_call>(\\n|\s)*\{"name"'),  # any model that writes calls as the Hermes models do
)
"""Model families and their parsers. The first family that fits a model decides."""


def parsers_for(facts: ModelFacts) -> Parsers:
    """Return vLLM's parsers for a model, with the reason."""
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
    """Whether the family's parser of reasoning would find its token or text: vLLM does not start where the token is missing."""
    if family.thinks == THINK:
        return THINK in facts.template and facts.has_token(THINK)
    return family.thinks in facts.template

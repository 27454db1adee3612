"""Parsers by model family: every name exists in vLLM, and each family's own template decides."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from lightning.policy_server.model_folder import ModelFacts, read_facts
from lightning.policy_server.parsers import FAMILIES, parsers_for


def facts(kind: str, template: str, *, name: str = "", vocabulary: str = '"<think>"') -> ModelFacts:
    return ModelFacts(name, kind, 0, 0, None, None, True, "", template, vocabulary)


def registered(room: str) -> set[str]:
    """The names in vLLM's own table, read without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / room / "__init__.py").read_text())
    tables = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    return {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}


def test_every_name_is_vllms() -> None:
    assert {family.tool for family in FAMILIES} - {""} <= registered("tool_parsers")
    assert {family.reasoning for family in FAMILIES} - {""} <= registered("reasoning")


HERMES = '{{ tools }}<tool_call>\\n{"name": '
DEEPSEEK = "{{ tools }}<\uff5ctool\u2581calls\u2581begin\uff5c>"
XML = "{{ tools }}<tool_call>\n<function="


@pytest.mark.parametrize(
    ("model", "tool", "reasoning"),
    [
        (facts("qwen2", HERMES), "hermes", ""),
        (facts("qwen2", HERMES + "<think>"), "hermes", "deepseek_r1"),
        (facts("qwen3", HERMES + "<think>"), "hermes", "qwen3"),
        (facts("qwen3", HERMES + "<think>", vocabulary=""), "hermes", ""),
        (facts("qwen3_moe", XML), "qwen3_coder", ""),
        (facts("qwen3_5", XML + "<think>"), "qwen3_coder", "qwen3"),
        (facts("qwen2", "{% if tools %}<\uff5cAssistant\uff5c><think>"), "", "deepseek_r1"),
        (facts("llama", "{{ tools }}Environment: ipython"), "llama3_json", ""),
        (facts("llama", HERMES), "hermes", ""),
        (facts("llama", "{{ tools }}", name="Llama-xLAM-2-8b"), "xlam", ""),
        (facts("llama", "{{ messages }}"), "", ""),
        (facts("llama4", "{{ tools }}"), "llama4_pythonic", ""),
        (facts("mistral", "{{ tools }}[TOOL_CALLS]"), "mistral", ""),
        (facts("deepseek_v3", "{{ tools }}"), "", ""),
        (facts("deepseek_v3", "</think><think>", name="DeepSeek-R1"), "", "deepseek_r1"),
        (facts("deepseek_v3", DEEPSEEK), "deepseek_v3", ""),
        (facts("deepseek_v3", DEEPSEEK + "</think><think>", name="DeepSeek-R1"), "deepseek_v3", "deepseek_r1"),
        (facts("deepseek_v3", DEEPSEEK + "{% if thinking %}<think>"), "deepseek_v31", "deepseek_v3"),
        (facts("glm4_moe", "{{ tools }}<think>", name="GLM-4.5-Air"), "glm45", "glm45"),
        (facts("glm4_moe", "{{ tools }}<think>", name="GLM-4.7"), "glm47", "glm47"),
        (facts("kimi_k2", "{{ tools }}"), "kimi_k2", ""),
        (facts("gpt_oss", "{{ tools }}"), "openai", "openai_gptoss"),
        (facts("granite", "{{ tools }}thinking"), "granite", "granite"),
        (facts("granitemoehybrid", "{{ tools }}"), "granite4", ""),
        (facts("hunyuan_v1_moe", "{{ tools }}<think>"), "hunyuan_a13b", "hunyuan_a13b"),
        (facts("minimax_m2", "{{ tools }}<think>"), "minimax_m2", "minimax_m2_append_think"),
        (facts("phi3", "{{ tools }}<|tool|>"), "phi4_mini_json", ""),
        (facts("phi3", "{{ tools }}"), "", ""),
        (facts("internlm2", "{{ tools }}<|plugin|>"), "internlm", ""),
        (facts("gemma4", "{{ tools }}thinking"), "gemma4", "gemma4"),
        (facts("gemma3_text", "{{ messages }}"), "", ""),
        (facts("nobodys", "{{ tools }}"), "", ""),
    ],
)  # fmt: skip
def test_the_parsers_of_a_family(model: ModelFacts, tool: str, reasoning: str) -> None:
    assert parsers_for(model)[:2] == (tool, reasoning)


def test_why_there_is_none() -> None:
    assert parsers_for(facts("llama", "{{ messages }}")).why == "the chat template knows no tools"
    assert "no parser is known for model_type 'nobodys'" in parsers_for(facts("nobodys", "{{ tools }}")).why


def test_the_projects_own_models_call_tools_as_hermes_does(model: Path) -> None:
    assert parsers_for(read_facts(model))[:2] == ("hermes", "")

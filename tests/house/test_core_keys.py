"""The core imports no plugin and keys on no plugin's name: what can be left out of the line is known by what it registers.

Looked at are imports, for type checkers too, and texts in the code of `core/`: the name of a plugin or an adapter, the name of
its package or of a module there, and the key of a plugin's setting, or one below it. Not looked at are docstrings, and texts of
several words, which are for people: an error or a help may give an example. A kind of hooks may have the name of a plugin
(`samplers`). Names that plugins register (`gloo`, `learnable`) are too often plain words to look for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from lightning import hooks
from lightning.plugins import plugins

from tests.house.size import is_docstring
from tests.house.test_extras import added_keys

ROOT = Path(__file__).parents[2]
OTHER_MEANINGS = {
    "__init__.py": dict.fromkeys(("command", "untrained"), "a public name"),
    "cli/app.py": {"debug": "a level of the log"},
    "cli/runs.py": {"record": "what a step has, in `--json`"},
    "config/other_words.py": {"verl": "the library, whose words these are"},
    "cli/train.py": {"prompts": "a folder in the run's own"},
    "gateway/stages.py": {"session": "a kind of key"},
    "instrument/__init__.py": {"untrained": "a public name"},
    "instrument/components.py": {"untrained": "a field of rooms"},
    "instrument/context.py": {"lightning_session": "the name of a context variable"},
    "gateway/gateway.py": {"server": "a field of `/health`"},
    "gateway/upstream.py": {"lightning_attach": "a method of vLLM's workers"},
    "instrument/marking.py": dict.fromkeys(("crewai", "dspy", "llama_index", "smolagents"), "a framework's package"),
    "policy_server/control.py": {"lightning_attach": "a method of vLLM's workers"},
    "policy_server/model_folder.py": {"policies": "the metadata of a file with adapters"},
    "policy_server/owner_secret.py": {"lightning_attach": "a method of vLLM's workers"},
    "policy_server/vllm_arguments.py": {"ray": "an executor of vLLM's"},
    "policy_server/vllm_server.py": {"attach": "the setting `policy_server.attach`"},
    "runner/outcomes.py": {"untrained": "a field of outcomes"},
    "store/operation.py": {"record": "an argument of operations"},
    "store/rows.py": {"resources": "a field of rollouts"},
    "testing/decisions.py": {"planner": "an agent of a made-up task"},
    "trainer/run_stages.py": {"prompts": "a point where stages stand"},
    "trainer/samplers.py": {"record": "a point where samplers stand"},
}
"""Words of the core that are the name of a plugin, too, by file, with what they are there."""
LEFT = {
    "__init__.py": {
        *(
            "lightning_command.agent",
            "lightning_debug.judge",
            "lightning_finetuning.distill",
            "lightning_finetuning.dpo",
        ),
        *("lightning_finetuning.sft", "lightning_prompts.apo", "lightning_session.session"),
    },  # public names such as `lightning.APO`, of which type checkers must know, too
    "cli/demo.py": {"console", "lightning_console"},  # its pages and `--console`: no place adds options to a command
    "instrument/components.py": {"raw"},  # the adapter whose answer is no framework's
    "instrument/marking.py": {"raw"},  # the same
    "testing/__init__.py": {"branching", "lightning_branching", "lightning_branching.fixture"},  # the fixture `replay`
}
"""What is left, by file."""


@cache
def settings_of_plugins() -> set[str]:
    """The keys of plugins' settings, also without the section that they stand in."""
    found = set()
    for name in plugins().names("settings"):
        kind = cast("Any", plugins().get("settings", name))()
        keys = added_keys(kind)
        found |= {*keys, *(key.removeprefix(f"{kind.place}.") for key in keys)}
    return found


@cache
def names() -> set[str]:
    """The names of plugins and adapters that are no kinds of hooks."""
    kinds = {name.removeprefix("register_") for name in vars(hooks) if name.startswith("register_")}
    return {folder.name for place in ("plugins", "adapters") for folder in (ROOT / place).iterdir()} - kinds


@cache
def packages() -> set[str]:
    """The packages of plugins and adapters."""
    return {file.parent.name for place in ("plugins", "adapters") for file in (ROOT / place).glob("*/*/__init__.py")}


def of_plugins(tree: ast.AST) -> Iterator[str]:
    """What a file names of plugins."""
    words, keys, homes = names(), settings_of_plugins(), packages()
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and is_docstring(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] in homes)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in homes:
            yield str(node.module)
        elif isinstance(node, ast.Constant) and isinstance(text := node.value, str) and id(node) not in documented:
            below = any("." in key and text.startswith(f"{key}.") for key in keys)
            if not re.search(r"\s", text) and (text in words | keys or below or text.partition(".")[0] in homes):
                yield text


@pytest.mark.parametrize(
    "code",
    [
        "import lightning_verl.engine",
        "def late():\n    from lightning_verl import engine",
        "if config.runner.kind == 'verl': pass",
        "find('engine.verl')",
        "names = ('engine.lora', 'engine.verl.strategy')",
        "f'engine.verl.{key}'",
        "getattr(trainer, 'alerts')",
        "MADE = {'APO': 'lightning_prompts.apo'}",
    ],
)
def test_a_plugin_that_the_code_names_is_seen(code: str) -> None:
    assert len(list(of_plugins(ast.parse(code)))) == 1


def test_texts_for_people_and_kinds_of_hooks_are_no_keys() -> None:
    code = "def f():\n    'verl'\n    raise ValueError('set engine.verl.nodes = 2')\nplugins().names('samplers')"
    assert list(of_plugins(ast.parse(code))) == []


def test_the_core_keys_on_no_plugins_name_but_those_that_are_left() -> None:
    core = ROOT / "core/lightning"
    found = {str(file.relative_to(core)): set(of_plugins(ast.parse(file.read_text()))) for file in core.rglob("*.py")}
    keyed = {file: words - set(OTHER_MEANINGS.get(file, ())) for file, words in found.items()}
    assert {file: words for file, words in keyed.items() if words} == LEFT
    gone = {(file, word) for file, words in OTHER_MEANINGS.items() for word in words if word not in found[file]}
    assert gone == set()


def test_the_keys_of_plugins_are_known_with_their_section_and_without() -> None:
    assert {"engine.verl", "runner.sandbox", "trainer.alerts", "alerts"} <= settings_of_plugins()

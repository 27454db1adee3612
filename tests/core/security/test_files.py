"""Nothing that comes over the wire or off the disk is unpickled."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    file for room in ("core/lightning", "adapters", "plugins", "examples") for file in (ROOT / room).rglob("*.py")
)

PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "_pickle"}
UNSAFE = {"torch.load", "pandas.read_pickle", "eval", "exec", "yaml.load", "yaml.unsafe_load", "os.system"}
UNSAFE_SWITCHES = {"allow_pickle", "trust_remote_code", "shell"}
MAY_PICKLE = {"core/lightning/runner/agent_serialization.py"}
"""Packs the agent for processes of the one who started it."""
MAY_UNPACK = {
    "core/lightning/runner/agent_serialization.py",
    "core/lightning/runner/forkserver_main.py",
    "core/lightning/runner/worker.py",
}
"""The processes that run agents: not the trainer's, not the server's."""


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def texts(words: Collection[str]) -> Iterator[tuple[str, str]]:
    """The sources that have one of the words, by their place."""
    for file in SOURCES:
        text = file.read_text()
        if any(word in text for word in words):
            yield str(file.relative_to(ROOT)), text


def test_only_the_packing_of_agents_knows_pickle() -> None:
    found = {name for name, text in texts(PICKLES) if PICKLES & set(imports(ast.parse(text)))}
    assert found == MAY_PICKLE


def test_only_processes_of_agents_unpack_them() -> None:
    assert {name for name, _ in texts({"unpack_agent", "unpack_stages"})} == MAY_UNPACK


def test_nothing_loads_what_may_hold_code() -> None:
    found = []
    for place, text in texts({*UNSAFE, *UNSAFE_SWITCHES}):
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            switched = {keyword.arg for keyword in call.keywords if ast.unparse(keyword.value) == "True"}
            if name in UNSAFE or UNSAFE_SWITCHES & switched:
                found.append(f"{place}:{call.lineno}: {name}")
    assert found == []

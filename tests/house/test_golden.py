"""What others build on does not change by accident: names, hooks, errors, commands.

`make golden` writes the files anew after a change that was meant.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import lightning
import pytest
from lightning import errors, hooks
from lightning.cli.app import build
from lightning_server.api.app import description
from typer.testing import CliRunner

from tests.house.goldens import golden
from tests.house.size import measure

ROOT = Path(__file__).parents[2]


def test_public_names() -> None:
    assert set(lightning.__all__) == {
        *("Task", "LLM", "Transition", "Rollout", "Trainer", "Session", "LightningRL", "DPO", "SFT", "Distill"),
        *("APO", "Judge"),
        *(
            "component",
            "tool",
            "reward",
            "label",
            "reject",
            "untrained",
            "command",
            "state",
            "StepState",
            "Caller",
            "ToolEvent",
            "hookimpl",
        ),
        *("LightningError", "MissingExtraError", "__version__"),
    }


@pytest.mark.parametrize("name", lightning.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(lightning, name)
    assert name == "__version__" or inspect.getdoc(value) or name == "hookimpl"
    assert name in dir(lightning)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lightning' has no attribute 'Trainr'"):
        lightning.Trainr  # noqa: B018


def test_type_checkers_see_the_names_that_are_lazy() -> None:
    tree = ast.parse(Path(lightning.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == lightning._HOME
    assert {*seen, "__version__"} == set(lightning.__all__)


def test_hooks() -> None:
    lines = []
    for name, function in vars(hooks).items():
        if hasattr(function, "lightning_spec"):
            lines.append(f"{name}({', '.join(inspect.signature(function).parameters)})\n")
    golden("hooks.txt", "".join(lines))


def test_the_drawn_error_tree_is_the_real_one() -> None:
    drawn: list[tuple[str, str, str]] = []
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        matched = re.match(r"    ([│├└─ ]*)(\w+Error)(?: \((\w+)\))?", line)
        if not matched:
            continue
        depth = len(matched[1]) // 4
        above[depth:] = [matched[2]]
        drawn.append((matched[2], above[depth - 1] if depth else "Exception", matched[3] or ""))
    real = []
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and cls.__module__ == errors.__name__:
            parent, *others = [base.__name__ for base in cls.__bases__]
            real.append((name, parent, others[0] if others else ""))
    assert sorted(drawn) == sorted(real)


def test_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    result = CliRunner().invoke(build(), ["--help"], terminal_width=100, env={"COLUMNS": "100"}, prog_name="lightning")
    assert result.exit_code == 0
    golden("help.txt", "\n".join(line.rstrip() for line in result.output.splitlines()) + "\n")


def test_the_description_of_the_servers_api() -> None:
    found = dict(description())
    found["info"] = {**found["info"], "version": "any"}  # type: ignore[dict-item]
    golden("openapi.json", json.dumps(found, indent=1) + "\n")


def test_every_package_that_is_typed_says_so() -> None:
    root = Path(lightning.__file__).parents[2]
    for package in (root / "core/lightning", root / "adapters/raw/lightning_raw", *root.glob("plugins/*/lightning_*")):
        assert (package / "py.typed").is_file(), package


def test_the_size_of_every_room() -> None:
    lines = [f"{'room':<28}{'files':>6}{'statements':>12}{'longest function':>18}\n"]
    for room, size in measure(ROOT).items():
        row = size.row()
        lines.append(f"{room:<28}{row['files']:>6}{row['statements']:>12}{row['longest function']:>18}\n")
    golden("size.txt", "".join(lines))

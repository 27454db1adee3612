"""docs/troubleshooting.md quotes what the code says, so that a search for a message finds it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PLACEHOLDER = re.compile(r"%[-#0+]*\d*(?:\.\d+)?[srdifeg]|\{[\w.]*(?:![rsa])?(?::[^{}]*)?\}")
"""Where a plain text is filled in later, by `%` (as the log's are) or by `format`."""


def messages() -> list[str]:
    """Every line of the page's `text` blocks."""
    found = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [line for block in found for line in block.splitlines()]


def sources() -> str:
    """Every text of the code but docstrings, a line each, with `…` for what is filled in."""
    found: set[str] = set()
    for file in (*ROOT.glob("core/lightning/**/*.py"), *ROOT.glob("plugins/**/*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = None  # a docstring is no message
        found.update(text for node in ast.walk(tree) for text in texts(node))
    return "\n".join(" ".join(text.split("\n")) for text in found)


def texts(node: ast.AST) -> Iterator[str]:
    """What a text of the code says: as it stands, and with its places filled in."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
        yield PLACEHOLDER.sub("…", node.value).replace("%%", "%")


def test_quoted_messages_are_what_the_code_says() -> None:
    said = sources()
    gone = [message for message in messages() if message not in said]
    assert gone == [], "no text of the core and its plugins has these: quote what it says now, or take the entry out"


def test_a_message_is_quoted_once_and_long_enough_to_be_found() -> None:
    quoted = messages()
    assert len(quoted) == len(set(quoted)) > 50
    assert [message for message in quoted if len(message.replace("…", "")) < 15] == []

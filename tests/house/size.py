"""How large each room is: files, lines, statements without docstrings, and how long functions and lines are.

    python tests/house/size.py [FOLDER] [--json]

FOLDER is a checkout, this one if none is given. Statements are those of the syntax tree, without docstrings, which are a share
of all lines. A function's length is in statements, those of functions in it included.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Size:
    """What the files of a room add up to."""

    files: int = 0
    lines: int = 0
    statements: int = 0
    docstring_lines: int = 0
    functions: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """The figures of the table."""
        share = self.docstring_lines / self.lines if self.lines else 0.0
        return {
            "files": self.files,
            "lines": self.lines,
            "statements": self.statements,
            "docstrings": round(share, 3),
            "function p90": percentile(self.functions),
            "width p90": percentile(self.widths),
        }


def percentile(values: list[int]) -> int:
    """The 90th."""
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else 0


def docstring(node: ast.AST) -> ast.Expr | None:
    """The statement that is a module's, a class' or a function's docstring."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return None
    first = node.body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return first if text else None  # type: ignore[return-value]


def add(size: Size, file: Path) -> None:
    """Count one file."""
    text = file.read_text()
    tree = ast.parse(text)
    size.files += 1
    size.lines += len(text.splitlines())
    size.widths += [len(line) for line in text.splitlines() if line.strip()]
    strings = [found for node in ast.walk(tree) if (found := docstring(node))]
    size.docstring_lines += sum((one.end_lineno or one.lineno) - one.lineno + 1 for one in strings)
    size.statements += sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - len(strings)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = sum(isinstance(one, ast.stmt) for one in ast.walk(node)) - 1
            size.functions.append(inner - (docstring(node) is not None))


def rooms(root: Path) -> Iterator[tuple[str, Path]]:
    """Each file of the code with its room: a folder of the core, a plugin, the adapters, the examples."""
    core = root / "core" / "lightning"
    for file in sorted(core.glob("**/*.py")):
        inside = file.relative_to(core)
        yield f"core/{inside.parts[0] if len(inside.parts) > 1 else '.'}", file
    for folder in ("plugins", "adapters", "examples"):
        for file in sorted((root / folder).glob("**/*.py")):
            name = file.relative_to(root / folder).parts[0]
            yield f"plugins/{name}" if folder == "plugins" else folder, file


def measure(root: Path) -> dict[str, Size]:
    """The sizes by room, with `core` and `plugins` as a whole."""
    found: dict[str, Size] = defaultdict(Size)
    for room, file in rooms(root):
        for name in {room, room.partition("/")[0]}:
            add(found[name], file)
    return dict(sorted(found.items()))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    found = measure(given.folder)
    if given.json:
        sys.stdout.write(json.dumps({name: size.row() for name, size in found.items()}) + "\n")
        return
    columns = list(Size().row())
    sys.stdout.write(f"| room | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n")
    for name, size in found.items():
        cells = [f"{value:,}" if isinstance(value, int) else str(value) for value in size.row().values()]
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()

"""How large each room is: files, statements without docstrings, and how long its functions are.

    python tests/house/size.py [FOLDER] [--json]

FOLDER is a checkout, this one if none is given. Statements are those of the syntax tree, without docstrings of any kind, those
of attributes included, which are a share of all lines. A function's length is in lines, its docstring left out.
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

LONG = 60
"""Lines of a function from which on it should be two."""


@dataclass
class Size:
    """What the files of a room add up to."""

    files: int = 0
    lines: int = 0
    statements: int = 0
    docstring_lines: int = 0
    functions: list[int] = field(default_factory=list)

    def add(self, other: Size) -> None:
        """Count another file, too."""
        self.files += other.files
        self.lines += other.lines
        self.statements += other.statements
        self.docstring_lines += other.docstring_lines
        self.functions += other.functions

    def row(self) -> dict[str, float]:
        """The figures of the table."""
        share = self.docstring_lines / self.lines if self.lines else 0.0
        return {
            "files": self.files,
            "lines": self.lines,
            "statements": self.statements,
            "docstrings": round(share, 3),
            "function p90": percentile(self.functions),
            "longest function": max(self.functions, default=0),
            f"functions over {LONG}": sum(length > LONG for length in self.functions),
        }


def percentile(values: list[int]) -> int:
    """The 90th."""
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else 0


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a text alone: the docstring of a module, a class, a function or an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines_of(node: ast.stmt) -> int:
    """How many lines a statement has."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def size_of(file: Path) -> Size:
    """Count one file."""
    text = file.read_text()
    size = Size(files=1, lines=len(text.splitlines()))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt):
            continue
        if is_docstring(node):
            size.docstring_lines += lines_of(node)
            continue
        size.statements += 1
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size.functions.append(lines_of(node) - (lines_of(node.body[0]) if is_docstring(node.body[0]) else 0))
    return size


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
        counted = size_of(file)
        for name in {room, room.partition("/")[0]}:
            found[name].add(counted)
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

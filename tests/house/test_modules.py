"""How the files of the code hang together: none only forwards, none is imported by what it imports, each class has one name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "core", *ROOT.glob("plugins/*"), *ROOT.glob("adapters/*"), ROOT / "examples"]


def modules() -> dict[str, ast.Module]:
    """The syntax trees of all files, by the names under which they are imported."""
    found = {}
    for folder in PACKAGES:
        for file in folder.glob("**/*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(file.read_text())
    return found


MODULES = modules()


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Modules of ours that these statements import, those of functions included; what is for type checkers is left out."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (name for name in (inner, node.module) if name in MODULES)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse)
        else:
            yield from imported(ast.iter_child_nodes(node))


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of a graph, or nothing."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                if found := walk(other, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def test_no_file_is_imported_by_what_it_imports() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    # An import in a function is one as well: it only hides what belongs together, or apart. A package is imported with each of
    # its modules, and names what it re-exports: that is no circle of files.
    graph = {
        name: {other for other in imported(tree.body) if not name.startswith(f"{other}.")}
        for name, tree in MODULES.items()
    }
    assert circle({name: others - {name} for name, others in graph.items()}) == []


def test_no_file_only_forwards() -> None:
    """A package's `__init__` may: it says what the package offers."""
    packages = {name.rpartition(".")[0] for name in MODULES}
    silent = (ast.Import, ast.ImportFrom, ast.Expr)
    found = [
        name
        for name, tree in MODULES.items()
        if name not in packages and tree.body and all(isinstance(node, silent) for node in tree.body)
    ]
    assert [name for name in found if "." in name] == []


def test_tests_of_the_core_import_no_plugin() -> None:
    """Nor in the scripts that they run: the core is tested alone, and a plugin where it lives."""
    ours = re.compile(r"^\s*(?:from|import) lightning_\w+", re.MULTILINE)
    files = (ROOT / "tests" / "core").rglob("*.py")
    assert [str(file.relative_to(ROOT)) for file in files if ours.search(file.read_text())] == []


def test_a_class_of_the_core_has_a_name_of_its_own() -> None:
    """Private ones too: whoever searches for a name finds one thing."""
    places: dict[str, list[str]] = {}
    for name, tree in MODULES.items():
        if name.partition(".")[0] == "lightning":
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_assertion_has_an_effect() -> None:
    """`python -O` drops assertions, with all that they do."""
    asserted = {
        name: [node for node in ast.walk(tree) if isinstance(node, ast.Assert)] for name, tree in MODULES.items()
    }
    awaiting = {
        name: node.lineno
        for name, nodes in asserted.items()
        for node in nodes
        if any(isinstance(each, ast.Await) for each in ast.walk(node))
    }
    assert awaiting == {}

"""What an agent needs in an image: its own files, the distributions that these import, the variables that they read.

The invariant: nothing of the agent is run. An import that cannot be found, a file that an image could not get and a secret in
a file are errors that name the place.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from lightning.errors import ConfigError, MissingExtraError

OURS = "lightning"
GIVEN = re.compile(r"OPENAI_(BASE_URL|API_KEY|API_BASE|MODEL)|ANTHROPIC_(BASE_URL|API_KEY|AUTH_TOKEN)|LIGHTNING_.*")
"""Variables that the runner gives to every agent."""
LEFT_OUT = frozenset({"__pycache__", ".git", ".venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"})


@dataclass(frozen=True, slots=True)
class AgentSources:
    """`paths` are files and folders, relative to the project's folder; `requirements` are `name==version` as installed here;
    `variables` are names of environment variables that the files read; `digest` is of the content of all files."""

    paths: tuple[Path, ...]
    requirements: tuple[str, ...]
    variables: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class _Import:
    module: str
    file: Path
    line: int


def find_sources(module: str, project: Path, include: Sequence[Path] = ()) -> AgentSources:
    """The sources of an agent's module, which is a file or package in the project's folder, or an installed package; of no
    module, those of `include` alone.

    Raises `ConfigError` for imports that cannot be found, each with its place, and for a file outside of the folder.
    """
    roots = dict.fromkeys(_inside(given, project) for given in include)
    third_party: dict[str, _Import] = {}
    variables: set[str] = set()
    if module:
        first = _Import(module, Path("the command"), 0)
        roots |= dict.fromkeys(_local(module, project) or _not_local(first, third_party))
    todo, files = list(roots), set[Path]()
    while todo:
        root = todo.pop()
        roots[root] = None
        for path in set(_all_files(root, project)) - files:
            files.add(path)
            if path.suffix != ".py":
                continue
            tree = _parse(project / path)
            variables |= {name for name in _variables(tree) if not GIVEN.fullmatch(name)}
            for found in _imports(tree, path):
                todo += _local(found.module, project) or _not_local(found, third_party)
    _check_no_secrets(sorted(files), project)
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\n".encode() + (project / path).read_bytes())
    paths = sorted(path for path in roots if not any(parent in roots for parent in path.parents))
    return AgentSources(tuple(paths), _requirements(third_party), tuple(sorted(variables)), digest.hexdigest())


def _local(module: str, project: Path) -> list[Path]:
    """The file of a module of the project, or its package as a whole, with what lies in it that is no code."""
    top = module.partition(".")[0]
    if (project / f"{top}.py").is_file():
        return [Path(f"{top}.py")]
    return [Path(top)] if any((project / top).rglob("*.py")) else []


def _all_files(path: Path, project: Path) -> Iterator[Path]:
    whole = project / path
    if not whole.exists():
        raise ConfigError(f"{path} is not there: an image cannot get it")
    for file in sorted(whole.rglob("*")) if whole.is_dir() else [whole]:
        inner = file.relative_to(project)
        if file.is_file() and not LEFT_OUT & set(inner.parts) and file.suffix != ".pyc":
            yield inner


def _inside(path: Path, project: Path) -> Path:
    """The path relative to the project's folder. Raises `ConfigError` for one that is outside."""
    whole = (project / path).resolve()
    if not whole.is_relative_to(project.resolve()):
        raise ConfigError(
            f"{path} is outside of {project}, where images are made from: move it there, or run this in another folder"
        )
    return whole.relative_to(project.resolve())


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise ConfigError(f"{file}:{error.lineno} is not Python: {error.msg}") from error


def _imports(tree: ast.Module, file: Path) -> Iterator[_Import]:
    """What a file imports when it is imported or run; imports that it tries, and goes on without, only if they are there."""
    skipped = {id(inner) for node in ast.walk(tree) if _may_fail(node) for inner in _below(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            if id(node) not in skipped or _distributions(name):
                yield _Import(name, file, node.lineno)


def _may_fail(node: ast.AST) -> bool:
    """Whether a block is for type checkers alone, or says what to do without its imports."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    caught = (
        [ast.unparse(handler.type) for handler in node.handlers if handler.type] if isinstance(node, ast.Try) else []
    )
    return any(name in text for text in caught for name in ("ImportError", "ModuleNotFoundError"))


def _below(node: ast.AST) -> Iterator[ast.AST]:
    for statement in getattr(node, "body", ()):
        yield from ast.walk(statement)


def _variables(tree: ast.Module) -> Iterator[str]:
    """Names of environment variables: `os.environ["A"]`, `os.environ.get("A")`, `os.getenv("A")`."""
    for node in ast.walk(tree):
        named: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            named = node.slice
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(("environ.get", "getenv")):
            named = node.args[0]
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            yield named.value


def _not_local(found: _Import, third_party: dict[str, _Import]) -> list[Path]:
    """Note the distributions of a module that is not the project's. Nothing of it is a file for the image."""
    if found.module.partition(".")[0] not in sys.stdlib_module_names:
        names = _distributions(found.module)
        if not names:
            third_party[f"!{found.module}"] = found
        for name in names:
            third_party.setdefault(name, found)
    return []


@cache
def _by_module() -> dict[str, list[str]]:
    return {module: list(dict.fromkeys(names)) for module, names in metadata.packages_distributions().items()}


@cache
def _distributions(module: str) -> tuple[str, ...]:
    """The installed distributions that a module is of. A namespace's parts are told apart by their files."""
    names = _by_module().get(module.partition(".")[0], [])
    if len(names) < 2:
        return tuple(names)
    inner = module.replace(".", "/")
    having = [
        name
        for name in names
        if any(str(file).startswith((f"{inner}/", f"{inner}.py")) for file in metadata.files(name) or ())
    ]
    return tuple(having or names)


def _requirements(third_party: dict[str, _Import]) -> tuple[str, ...]:
    """Raises `ConfigError` for modules that nothing installed has, and for distributions that only this machine has."""
    missing = [found for name, found in third_party.items() if name.startswith("!")]
    if missing:
        told = "; ".join(f"{found.file}:{found.line} imports {found.module}" for found in missing)
        raise ConfigError(
            f"{told}: that is neither beside the agent nor installed here, so an image cannot have it. Install it here, or "
            "give its files with --include"
        )
    names = sorted(name for name in third_party if _canonical(name) != OURS)
    for name in names:
        if "dir_info" in (metadata.distribution(name).read_text("direct_url.json") or ""):
            found = third_party[name]
            raise ConfigError(
                f"{found.file}:{found.line} imports {found.module}, which is installed from a folder of this machine: put its "
                "package into the project's folder, or install a published version"
            )
    return tuple(f"{_canonical(name)}=={metadata.version(name)}" for name in names)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_no_secrets(files: Sequence[Path], project: Path) -> None:
    """Raises `ConfigError` for a file that seems to have a key or a password in it."""
    try:
        from detect_secrets.core.secrets_collection import SecretsCollection
        from detect_secrets.settings import default_settings
    except ImportError as error:
        raise MissingExtraError("deploy", "detect_secrets") from error
    found = SecretsCollection()
    with default_settings():
        for file in files:
            found.scan_file(str(project / file))
    places = sorted({(str(Path(name).relative_to(project)), one.line_number) for name, one in found})
    if places:
        kinds = {one.line_number: one.type for _, one in found}
        told = "; ".join(f"{name}:{line} ({kinds[line]})" for name, line in places[:5])
        raise ConfigError(
            f"there seems to be a secret in {told}: whoever has the image would have it. Read it from the environment "
            '(os.environ["NAME"]): it is then given by reference. A line that has none may end with '
            '"# pragma: allowlist secret"'
        )

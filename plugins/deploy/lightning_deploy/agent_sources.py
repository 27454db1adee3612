"""What an agent needs in an image: its own files, the distributions that these import, the variables that they read. Also
locks, by uv, the versions that an image installs: for Linux on x86-64, with the digest of each file.

The invariant: none of the agent's code is run. An import that cannot be found, a file that an image could not get and a secret
in a file are errors that name the place; an error about a secret names its kind, never the secret. A library that is installed
here has the same version in the images of agents and servers. The trainer's versions are chosen anew, because vLLM's CUDA build
needs other versions than the CPU build that may be here.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning import __version__
from lightning.errors import ConfigError, MissingExtraError
from lightning.installation import Origin, source

PLATFORM = "x86_64-manylinux_2_28"
LOCKING_SECONDS = 300


def own_source() -> Origin:
    """Return the checkout or the wheel that lightning is installed from. Raises `ConfigError` if it is not known: the images
    need it, and `lightning` on the package index is another program."""
    found = source()
    if not found.place:
        raise ConfigError(
            "the images need lightning's wheel, and where this lightning was installed from is not known: install it by the "
            f"wheel's path, which `make dist` builds in the checkout (pip install --force-reinstall --no-deps "
            f"dist/lightning-{__version__}-py3-none-any.whl)"
        )
    return found


def lock(extras: Sequence[str], requirements: Sequence[str], python: str) -> str:
    """Return a requirements file with digests for lightning with these extras and for these requirements. Lightning itself is
    left out, because its wheel is copied. Raises `ConfigError` with uv's message when no versions fit together."""
    own = f"lightning[{','.join(extras)}]" if extras else "lightning"
    own += f" @ {Path(own_source().place).as_uri()}"
    options = ["--python-version", python, "--python-platform", PLATFORM, "--generate-hashes", "--no-annotate"]
    command = [*_uv(), "pip", "compile", "--quiet", "--no-header", *options, "--no-emit-package", "lightning", "-"]
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("".join(f"{line}\n" for line in ([] if "vllm" in extras else _installed())))
            constraints.flush()
            ran = subprocess.run(  # noqa: S603 — uv, without a shell
                [*command, "--constraints", constraints.name],
                input="\n".join([own, *requirements, ""]),
                capture_output=True,
                text=True,
                timeout=LOCKING_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"uv found no versions for the images in {LOCKING_SECONDS} s: is there a network?") from error
    if ran.returncode:
        raise ConfigError(f"the images' versions cannot be locked: {' '.join(ran.stderr.split())}")
    return ran.stdout


def _installed() -> list[str]:
    """Return what is installed here from a package index, as `name==version`."""
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions():  # the first on the path is the one that is imported
        if one.metadata["Name"]:
            found.setdefault(canonical(one.metadata["Name"]), one)
    return sorted(
        f"{name}=={one.version}"
        for name, one in found.items()
        if "+" not in one.version and one.read_text("direct_url.json") is None
    )


def _uv() -> list[str]:
    if find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    if found := shutil.which("uv"):
        return [found]
    raise MissingExtraError("deploy", "uv")


OURS = "lightning"
GIVEN = re.compile(
    r"OPENAI_(BASE_URL|API_KEY|API_BASE|MODEL)|ANTHROPIC_(BASE_URL|API_KEY|AUTH_TOKEN)|LIGHTNING_.*|PATH|PYTHON.*|HOME|USER"
    r"|SHELL|PWD|TERM|TMPDIR|TZ|LANG|LC_.*|.*_PROXY|.*_proxy"
)
"""Variables that the runner gives every agent, or that an image has itself."""
LEFT_OUT = frozenset({"__pycache__", ".git", ".venv", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache"})
"""Names of files and folders that are put into no image."""


@dataclass(frozen=True, slots=True)
class AgentSources:
    """The sources of an agent. `paths` are files and folders, relative to the project's folder. `requirements` are
    `name==version` as installed here. `variables` are the environment variables that the files read without a default. `digest`
    is that of all files' content."""

    paths: tuple[Path, ...]
    requirements: tuple[str, ...]
    variables: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Included:
    """What the user adds to the sources, because no import shows it: files and folders, requirements such as `pkg[extra]`, and
    files that are known to have no secret."""

    paths: tuple[Path, ...] = ()
    requirements: tuple[str, ...] = ()
    no_secret: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class _Import:
    module: str
    file: Path
    line: int
    needed: bool = True
    """Whether the file fails without the import."""


def find_sources(module: str, project: Path, included: Included) -> AgentSources:
    """Find the sources of an agent's module, which is a file or package in the project's folder (or its `src`), or an installed
    package. An empty module gives those of `included` alone.

    Raises `ConfigError` for imports that cannot be found, each with its place, for a file outside the folder, and for one that
    seems to have a secret.
    """
    roots = dict.fromkeys(_inside(given, project) for given in included.paths)
    third_party: dict[str, _Import] = {}
    variables: set[str] = set()
    if module:
        roots |= dict.fromkeys(_follow(_Import(module, Path("the command"), 0), project, third_party))
    todo, files = list(roots), set[Path]()
    while todo:
        root = todo.pop()
        roots[root] = None
        for path in set(files_below(root, project)) - files:
            files.add(path)
            if path.suffix == ".py":
                tree = _parse(project / path)
                variables |= {name for name in _variables(tree) if not GIVEN.fullmatch(name)}
                for found in _imports(tree, path):
                    todo += _follow(found, project, third_party)
    check_no_secrets(sorted(files - {_inside(path, project) for path in included.no_secret}), project)
    paths = sorted(path for path in roots if not any(parent in roots for parent in path.parents))
    requirements = (*_requirements(third_party), *included.requirements)
    return AgentSources(tuple(paths), requirements, tuple(sorted(variables)), digest_of(sorted(files), project))


def digest_of(files: Iterable[Path], project: Path) -> str:
    """Return a digest of the paths and content of some files."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path}\n".encode() + (project / path).read_bytes())
    return digest.hexdigest()


def _follow(found: _Import, project: Path, third_party: dict[str, _Import]) -> list[Path]:
    """Return the project's files for an import; an import of a library is noted in `third_party` instead."""
    top = found.module.partition(".")[0]
    if top in sys.stdlib_module_names or top == OURS or top.startswith(f"{OURS}_"):
        return []
    names = _distributions(found.module)
    for base in (Path(), Path("src")):
        if (project / base / f"{top}.py").is_file():
            return [base / f"{top}.py"]
        # Python takes a folder without __init__.py only if nothing that is installed has that name.
        package, there = project / base / top, (project / base / top / "__init__.py").is_file()
        if there or (not names and any(package.rglob("*.py"))):
            return [base / top]
    if not names and found.needed:
        third_party[f"!{found.module}"] = found
    for name in names:
        third_party.setdefault(name, found)
    return []


def files_below(path: Path, project: Path) -> Iterator[Path]:
    """Yield the files that an image gets for a file or folder. Raises `ConfigError` for one that does not exist."""
    whole = project / path
    if not whole.exists():
        raise ConfigError(f"{path} is not there: an image cannot get it")
    for file in sorted(whole.rglob("*")) if whole.is_dir() else [whole]:
        inner = file.relative_to(project)
        left_out = LEFT_OUT & set(inner.parts) or inner.name.startswith(".env")
        if file.is_file() and not left_out and file.suffix != ".pyc":
            yield inner


def _inside(path: Path, project: Path) -> Path:
    """Return the path relative to the project's folder. Raises `ConfigError` for a path outside."""
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
    """Yield the imports of a file when it is imported or run. An import that the file can do without is not `needed`."""
    optional = {id(inner) for node in ast.walk(tree) for inner in _optional(node)}
    unread = {
        id(inner) for node in ast.walk(tree) if _for_type_checkers(node) for inner in _below(getattr(node, "body", ()))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        else:
            continue
        if id(node) not in unread:
            yield from (_Import(name, file, node.lineno, id(node) not in optional) for name in names)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _optional(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of blocks that have an alternative: those around an ImportError, or chosen by Python's version."""
    if isinstance(node, ast.Try):
        caught = [ast.unparse(handler.type) for handler in node.handlers if handler.type]
        if any(name in text for text in caught for name in ("ImportError", "ModuleNotFoundError")):
            yield from _below([*node.body, *(line for handler in node.handlers for line in handler.body)])
    elif isinstance(node, ast.If) and "version_info" in ast.unparse(node.test):
        yield from _below([*node.body, *node.orelse])


def _below(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


def _variables(tree: ast.Module) -> Iterator[str]:
    """Yield the names of environment variables that are read without a default: `os.environ["A"]`, `os.getenv("A")`."""
    for node in ast.walk(tree):
        named: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            named = node.slice if ast.unparse(node.value).endswith("environ") else None
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("environ.get", "getenv")):
            named = node.args[0] if len(node.args) == 1 and not node.keywords else None
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            yield named.value


@cache
def _by_module() -> dict[str, list[str]]:
    return {module: list(dict.fromkeys(names)) for module, names in metadata.packages_distributions().items()}


@cache
def _distributions(module: str) -> tuple[str, ...]:
    """Return the installed distributions that have a module. Parts of a namespace package are told apart by their files."""
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
    """Return the requirements for the imported libraries. Raises `ConfigError` for modules that nothing installed has, and for
    distributions installed from a folder of this machine."""
    missing = [found for name, found in third_party.items() if name.startswith("!")]
    if missing:
        told = "; ".join(f"{found.file}:{found.line} imports {found.module}" for found in missing)
        raise ConfigError(
            f"{told}: that is neither beside the agent nor installed here, so an image cannot have it. Install it here, or "
            "give its files with --include, or its distribution with --require"
        )
    names = sorted(third_party)
    for name in names:
        if "dir_info" in (metadata.distribution(name).read_text("direct_url.json") or ""):
            found = third_party[name]
            raise ConfigError(
                f"{found.file}:{found.line} imports {found.module}, which is installed from a folder of this machine: put its "
                "package into the project's folder, or install a published version"
            )
    return tuple(f"{canonical(name)}=={metadata.version(name)}" for name in names)


def canonical(name: str) -> str:
    """Return a distribution's name in the normal form of indexes (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


CODE = frozenset({".py", ".sh", ".js", ".mjs", ".ts", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".conf", ".env"})
"""Types of files in which a string of high entropy, or an assignment to a password, is probably a secret; in other files it is
data."""
GUESSES = frozenset({"Base64HighEntropyString", "HexHighEntropyString", "KeywordDetector"})


def check_no_secrets(files: Sequence[Path], project: Path) -> None:
    """Raise `ConfigError` for files that seem to have a secret."""
    found = {
        (str(path), line): kind
        for code in (True, False)
        for path, line, kind in _scanned([file for file in files if (file.suffix in CODE) == code], project, code=code)
    }
    if found:
        told = "; ".join(f"{name}:{line} ({kind})" for (name, line), kind in sorted(found.items())[:5])
        raise ConfigError(
            f"there seems to be a secret in {told}: whoever has the image would have it. Read it from the environment "
            '(os.environ["NAME"]): it is then given by reference. A line that has none may end with '
            '"# pragma: allowlist secret", and a file that has none is named with --no-secret'
        )


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for an argument that seems to be or contain a secret, since it would be written into a manifest."""
    scan, settings, plugins = _library()
    for place, text in enumerate(arguments):
        with settings({"plugins_used": [{"name": name} for name in plugins if name not in GUESSES]}):
            kinds = [one.type for one in scan.scan_line(text)]
        query = text.partition("?")[2] if "://" in text else ""
        if kinds or "password=" in query:
            before = arguments[place - 1] if place else "the command"
            raise ConfigError(
                f"what follows {before} seems to hold a secret ({kinds[0] if kinds else 'a password in a URL'}), which would "
                "be in a file: give it by the environment"
            )


def _scanned(files: Sequence[Path], project: Path, *, code: bool) -> list[tuple[Path, int, str]]:
    scan, settings, plugins = _library()
    names = [{"name": name} for name in plugins if code or name not in GUESSES]
    with settings({"plugins_used": names}):
        return [(file, one.line_number, one.type) for file in files for one in scan.scan_file(str(project / file))]


def _library() -> tuple[Any, Any, list[str]]:
    try:
        from detect_secrets.core import scan
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
        from detect_secrets.settings import default_settings, transient_settings
    except ImportError as error:
        raise MissingExtraError("deploy", "detect_secrets") from error
    with default_settings():
        plugins = [kind.__name__ for kind in get_mapping_from_secret_type_to_class().values()]
    plugins.remove("IPPublicDetector")  # an address is no secret
    return scan, transient_settings, plugins

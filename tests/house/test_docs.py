"""The documentation names everything that there is, in sections written by `make golden` from the code itself."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import lightning
import pytest
import typer
from lightning import errors, hooks
from lightning.cli.app import COMMANDS, build
from lightning.config import EngineConfig, load_config, settings
from lightning.config.load import NOT_SETTINGS
from lightning.config.other_words import WORDS, Word
from lightning.config.plugin_settings import config_model
from lightning.testing.public_imports import PUBLIC
from lightning_console.glossary import lines as glossary
from lightning_planner.cluster import Cluster, Gpu
from lightning_planner.memory import kv_tokens, training_items
from lightning_planner.shape import KNOWN, Shape, read_shape
from lightning_server import json_codec
from lightning_server.api.app import description, routes
from lightning_server.api.openapi import scopes_of
from lightning_server.api.table import parameters

from tests.house.pictures import floors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"


TOLD_ELSEWHERE = {
    "APO": "prompt-optimization.md",
    "Distill": "algorithms.md#distillation",
    "Judge": "rewards.md#a-judge",
    "LightningRL": "algorithms.md#the-low-levels",
    "command": "any-program.md",
}
"""Names whose arguments a page explains: of their docstrings the reference has the first paragraph."""


def names() -> Iterator[str]:
    for name in lightning.__all__:
        value = getattr(lightning, name)
        doc = "The version of lightning." if name == "__version__" else (inspect.getdoc(value) or "")
        if name == "hookimpl":
            doc = "Marks a function as the implementation of a hook (see [Hooks](hooks.md))."
        if name in TOLD_ELSEWHERE:
            first = doc.partition("\n\n")[0]
            doc = f"{first} [Its arguments]({TOLD_ELSEWHERE[name]})."
        call = f"{name}{_signature(value)}" if inspect.isfunction(value) else name
        yield f"### `{call}`\n\n{doc}\n"
        if dataclasses.is_dataclass(value) and name not in TOLD_ELSEWHERE:
            yield from noun_fields(value)
    yield "## What loops, credits and losses are given\n"
    for module, nouns in NOUNS.items():
        for name in nouns.split():
            noun = getattr(importlib.import_module(module), name)
            public = module in {each for group in PUBLIC.values() for each in group} or module.endswith(".protocol")
            yield f"### `{name}`\n\n{inspect.getdoc(noun)}{f' From `{module}`.' if public else ''}\n"
            yield from noun_fields(noun)


NOUNS = {
    "lightning.batch": "Group Trajectory Sample TokenSpan",
    "lightning.types": "StepReward Outcome VersionRun",
    "lightning.credit": "Credit",
    "lightning.algorithms": "Batch",
    "lightning.losses.protocol": "TokenBatch StepTokens LossOutput StepLoss",
    "lightning.engines.protocol": "StepResult",
    "lightning.trainer.summary": "Evaluation Summary",
}
"""The nouns that are no names of `import lightning`, by the module that they come from."""


def noun_fields(noun: type) -> Iterator[str]:
    """The fields and properties of a noun with their types: those with a docstring of their own as a list, the others in one
    line, since the noun's docstring explains them."""
    plain: list[str] = []
    told: list[str] = []
    for kind in reversed(noun.__mro__[:-1]):
        if not kind.__module__.startswith("lightning"):
            continue
        (node,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(node, ast.ClassDef)
        for item, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                doc = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                name, hint = item.target.id, ast.unparse(item.annotation)
            elif isinstance(item, ast.FunctionDef) and "property" in map(ast.unparse, item.decorator_list):
                doc, name, hint = (
                    ast.get_docstring(item) or "",
                    item.name,
                    ast.unparse(item.returns or ast.Constant("")),
                )
            else:
                continue
            if not name.startswith("_") and not hint.startswith(("ClassVar", "KW_ONLY")):
                hint = hint.replace("npt.", "")
                (told if doc else plain).append(
                    f"- `{name}: {hint}` {' '.join(str(doc).split())}" if doc else f"`{name}: {hint}`"
                )
    if plain:
        yield f"Fields: {', '.join(plain)}.\n"
    yield from told
    yield ""


def _signature(function: Callable[..., object]) -> str:
    parts = [str(part) for part in inspect.signature(function).parameters.values()]
    return f"({', '.join(re.sub(r':.*?(?= =|$)', '', part) for part in parts)})"


HOOKS_ELSEWHERE = {
    "register_operations": "store-operations.md",
    "register_settings": "writing-a-plugin.md#settings",
    "register_trackers": "trackers.md#a-tracker-of-your-own",
    "register_commands": "writing-a-plugin.md#a-command",
    "register_dialects": "writing-a-plugin.md#an-api-of-the-gateway",
    "register_call_stages": "call-stages.md",
    "register_attempt_stages": "attempt-stages.md",
    "register_step_stages": "step-stages.md",
    "register_samplers": "samplers.md#a-sampler",
    "register_orders": "samplers.md#an-order",
}
"""Hooks that a page explains: of their docstrings the reference has the first paragraph."""


def hook_list() -> Iterator[str]:
    for name, function in vars(hooks).items():
        if hasattr(function, "lightning_spec"):
            doc = inspect.getdoc(function) or ""
            if name in HOOKS_ELSEWHERE:
                first = doc.partition("\n\n")[0]
                doc = f"{first} [More]({HOOKS_ELSEWHERE[name]})."
            yield f"### `{name}({', '.join(inspect.signature(function).parameters)})`\n\n{doc}\n"


def settings_list() -> Iterator[str]:
    """Each setting with its default, the values that it accepts, and its help."""
    for section, field in config_model().model_fields.items():
        yield f"### `[{section}]`\n\n{inspect.getdoc(field.annotation)}\n"
        for setting in settings():
            if setting.key.startswith(f"{section}."):
                accepts, said = _few_words(setting.accepts), " ".join(setting.help.split())
                told = "" if accepts in ("string", "true or false") else f" ({accepts})"
                yield f"- `{setting.key} = {setting.default}`{told}: {said}"
        yield ""


def _few_words(accepts: str) -> str:
    """What a setting accepts, as a list says it: `integer ≥ 1, null` for "an integer >= 1, or null"."""
    text = re.sub(r"\ba table of names and ", "table of ", accepts)
    text = re.sub(r">= ([\d.]+) and <= ([\d.]+)", r"\1 to \2", text)
    text = re.sub(r",? or ", ", ", re.sub(r"\ban? ", "", text))
    return text.replace("true, false", "true or false").replace(">=", "≥")


def brings() -> Iterator[tuple[str, str, str]]:
    """The kind and the name of each thing that this distribution's metadata says plugins bring, and the plugin's package."""
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lightning.brings"]
    for entry, module in entries.items():
        kind, _, name = entry.partition(".")
        yield kind, name, module.partition(".")[0]


def brought(kind: str) -> list[str]:
    """The names of a kind, in the metadata's order."""
    return [name for other, name, _ in brings() if other == kind]


def commands() -> Iterator[str]:
    """Each command with its arguments and options; what several commands say in the same words is said once, at the head."""
    found: list[tuple[str, Any]] = []
    for name in (*COMMANDS, *brought("commands")):
        command = typer.main.get_command(build(name)).commands[name]  # type: ignore[attr-defined]
        found.append((f"lightning {name}", command))
        found += [(f"lightning {name} {inner}", below) for inner, below in getattr(command, "commands", {}).items()]
    counted = Counter((_label(item), item.help or "") for _, command in found for item in command.params)
    shared: dict[str, str] = {}
    for (label, said), times in counted.most_common():
        if times >= (2 if len(said.split()) > 9 else 3) and said and label not in shared:
            shared[label] = said
    yield "### Said once for several commands\n"
    yield from (f"- `{label}` {said}" for label, said in sorted(shared.items()))
    yield ""
    for title, command in found:
        yield from command_section(title, command, shared)


def command_section(title: str, command: Any, shared: dict[str, str]) -> Iterator[str]:
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    shown = " ".join([title, *(item.name.upper() if item.required else f"[{item.name.upper()}]" for item in arguments)])
    yield f"### `{shown}`\n\n{inspect.cleandoc(command.help or '')}\n"
    above = []
    for item in command.params:
        label = _label(item)
        if shared.get(label) == (item.help or ""):
            above.append(f"`{label}`")
        else:
            yield f"- `{label}` {item.help or ''}"
    if above:
        yield f"- [as above](#said-once-for-several-commands): {', '.join(above)}"
    yield ""


def _label(item: Any) -> str:
    if item.param_type_name == "argument":
        return str(item.metavar or item.name.upper())
    return ", ".join(item.opts) + (f" {item.metavar}" if item.metavar else "")


def error_list() -> Iterator[str]:
    yield "```text"
    yield from (line[4:] for line in (errors.__doc__ or "").splitlines() if re.match(r"    .*Error", line))
    yield "```"


def server_routes() -> Iterator[str]:
    """Each route, then each type; the fields of a message that one route alone has stand at the route."""
    schemas: dict[str, Any] = description()["components"]["schemas"]  # type: ignore[index, call-overload, assignment]
    asked = [(name, item.metadata["doc"]) for route in routes() for name, item in parameters(route.query).items()]
    shared = {pair for pair, times in Counter(asked).items() if times >= 3}
    yield "### Parameters of several routes\n"
    yield from (f"- `{name}`: {said}" for name, said in sorted(shared))
    yield "\n### Routes\n"
    for route in routes():
        names = "no token" if route.scopes is None else ", ".join(scopes_of(route)[:-1]) or "admin"
        scopes = "any token" if len(names.split(", ")) == 3 else names
        body = None if route.body is None else _type(route.body, schemas)
        told = "any JSON" if route.answer is json_codec.AnyJson else _type(route.answer, schemas)
        exchanged = (
            f"Answer: {told}" if body is None else f"Body: {body}. Answer: {'the same' if told == body else told}"
        )
        query = [(name, item.metadata["doc"]) for name, item in parameters(route.query).items()]
        known = [f"`{name}`" for name, said in query if (name, said) in shared and name not in ("cursor", "limit")]
        more = f" Parameter: {', '.join(known)}." if known else ""
        yield f"- `{route.method} {route.path}` ({scopes}): {route.doc} {exchanged}.{more}"
        yield from (f"    - `{name}`: {said}" for name, said in query if (name, said) not in shared)
    yield "\n### Types\n"
    for name, schema in schemas.items():
        if not _of_one_route(schema):
            said = (
                f"[`lightning.{name}`](api.md#{name.lower()})." if name in lightning.__all__ else schema["description"]
            )
            values = ", ".join(f"`{value}`" for value in schema.get("enum", ()))
            yield f"#### {name}\n\n{said}\n\n{_fields(schema) or values}\n"


def _of_one_route(schema: dict[str, Any]) -> bool:
    return bool(re.match(r"What `\w+` (answers|is asked)\.", schema["description"]))


def _fields(schema: dict[str, Any]) -> str:
    """The fields of an object by what they may be: `name`, `error` string; `step` integer."""
    found: dict[str, list[str]] = {}
    for field, said in schema.get("properties", {}).items():
        found.setdefault(_kind(said), []).append(f"`{field}`")
    return "; ".join(f"{', '.join(fields)} {kind}" for kind, fields in found.items())


def _type(hint: type, schemas: dict[str, Any]) -> str:
    parts = get_args(hint)
    name = (parts[0] if parts else hint).__name__
    if _of_one_route(schemas[name]):
        return _fields(schemas[name])
    return f"{'a page of ' if parts else ''}[{name}](#{name.lower()})"


def _kind(schema: dict[str, Any]) -> str:
    """What a field may be, in few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(part) for part in schema["anyOf"] if "enum" not in part)
    if schema.get("contentEncoding"):
        return schema["description"]
    if schema.get("type") == "array":
        return "list of " + (
            _kind(schema["items"]) if schema["items"] else " and ".join(map(_kind, schema["prefixItems"]))
        )
    if schema.get("type") == "object":
        return f"object of {_kind(schema['additionalProperties'])}"
    return schema.get("type", "any JSON")


def module_tables() -> Iterator[str]:
    """Each room of the core and each plugin, with the first paragraph of its docstring."""
    core = ROOT / "core" / "lightning"
    yield "### Rooms of the core\n\n| floor | room | |\n|---|---|---|"
    for floor, names in floors().items():
        for name in (name for name in names if not name.startswith("_")):
            file = core / name / "__init__.py"
            yield f"| {floor} | `{name}` | {_first_words(file if file.exists() else core / f'{name}.py')} |"
    yield "\n### Plugins\n\n| plugin | | brings |\n|---|---|---|"
    for file in sorted((ROOT / "plugins").glob("*/*/__init__.py")):
        named: dict[str, list[str]] = {}
        for kind, name, package in brings():
            if package == file.parent.name:
                table = name.rpartition(".")[0] if name.count(".") == 2 else name
                named.setdefault(kind.replace("_", " "), []).append(f"`{table}`")
        listed = "; ".join(f"{kind} {', '.join(dict.fromkeys(names))}" for kind, names in named.items())
        yield f"| `{file.parents[1].name}` | {_first_words(file)} | {listed} |"


def _first_words(file: Path) -> str:
    return " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0].split())


def models_that_fit() -> Iterator[str]:
    """For each model, the tokens that one GPU's KV cache holds while vLLM serves beside what the torch engine keeps."""
    sizes = (24, 48, 80, 141)
    yield "| model | | " + " | ".join(f"{size} GB" for size in sizes) + " |\n|---|---|" + "---|" * len(sizes)
    for name in KNOWN:
        shape = read_shape(name)
        for kind, lora in (("full", None), ("LoRA", {"rank": 16})):
            engine = EngineConfig.model_validate({"dtype": "bfloat16", "gradient_checkpointing": True, "lora": lora})
            cells = " | ".join(_context(shape, engine, size * 1e9) for size in sizes)
            yield f"| {name.partition('/')[2] if kind == 'full' else ''} | {kind} | {cells} |"


def _context(shape: Shape, engine: EngineConfig, bytes_: float) -> str:
    cluster = Cluster(Gpu("", bytes_, 1, 1), 1)
    items, other = training_items(shape, 1, engine), cluster.assumptions.overhead
    kept = sum(item.bytes for item in items if item.name in ("weights", "AdamW's moments")) + other
    tokens = kv_tokens(shape, cluster, 1 - kept / bytes_)
    fits = sum(item.bytes for item in items) + other <= bytes_ and tokens >= engine.tokens_per_microbatch
    return f"{round(tokens, -3):,.0f}" if fits else "none"


def public_modules() -> Iterator[str]:
    yield "| for | modules |\n|---|---|"
    yield from (f"| {group} | {' '.join(f'`{module}`' for module in found)} |" for group, found in PUBLIC.items())


def stage_to_copy() -> Iterator[str]:
    yield f"```python\n{(ROOT / 'examples/third_party_stage/lightning_tag/__init__.py').read_text().rstrip()}\n```"


def other_words() -> Iterator[str]:
    """The words of all libraries, those with one meaning in one row."""
    found: dict[str, tuple[Word, list[str]]] = {}
    for name, word in WORDS.items():
        found.setdefault(word.meaning, (word, []))[1].append(f"`{name}`")
    yield "| word | means | here |\n|---|---|---|"
    yield from (f"| {', '.join(names)} | {word.meaning} | `{word.answer}` |" for word, names in found.values())


SECTIONS = {
    "call-stages.md": stage_to_copy,
    "modules.md": module_tables,
    "api.md": names,
    "hooks.md": hook_list,
    "coming-from.md": other_words,
    "configuration.md": settings_list,
    "cli.md": commands,
    "errors.md": error_list,
    "glossary.md": glossary,
    "server-api.md": server_routes,
    "which-model.md": models_that_fit,
    "writing-a-plugin.md": public_modules,
}


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_page_says_what_the_code_says(name: str) -> None:
    file = DOCS / name
    text = file.read_text()
    begin, end = "<!-- from the code: begin -->\n", "<!-- from the code: end -->"
    before, _, rest = text.partition(begin)
    old, _, after = rest.partition(end)
    new = "\n" + "\n".join(SECTIONS[name]()).strip() + "\n\n"
    if UPDATE:
        file.write_text(before + begin + new + end + after)
        old = new
    assert old == new, f"docs/{name} is not what the code says: run `make golden` and commit it"


def test_variables_that_are_not_settings_are_documented() -> None:
    page = (DOCS / "configuration.md").read_text()
    for name in NOT_SETTINGS:
        assert f"`{name}`" in page


def settings_shown() -> Iterator[tuple[str, str]]:
    """The pages' TOML blocks of settings: not those of a `pyproject.toml`, and not the file of a sweep."""
    for file in sorted(DOCS.glob("**/*.md")):
        for block in re.findall(r"^```toml\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE):
            if not {"project", "build-system"} & set(tomllib.loads(block)) and file.name != "sweeps.md":
                yield str(file.relative_to(DOCS)), block


@pytest.mark.parametrize(("page", "block"), list(settings_shown()))
def test_the_settings_that_a_page_shows_load(page: str, block: str, tmp_path: Path) -> None:
    file = tmp_path / page.replace("/", "-")
    file.write_text(block)
    load_config(file, env={})


def test_global_options_are_documented() -> None:
    page = (DOCS / "cli.md").read_text()
    for option in typer.main.get_command(build()).params:
        assert f"`{option.opts[0]}`" in page


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for file in DOCS.glob("**/*.md"):
        assert str(file.relative_to(DOCS)) in navigation, file

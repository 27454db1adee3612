"""`python -m lightning_examples.paper`: the paper's three experiments, the untrained policy beside the trained one, in one
command that goes on where it was stopped.

The invariant: nothing begins while anything is missing; a training with a result is not run again; one that fails costs the
others nothing.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lightning
from lightning.cli.output import escape, fail, say, warn
from lightning.errors import ConfigError, LightningError
from lightning.trainer.runs import claim_folder
from lightning_deploy.processes import end

from lightning_examples.paper.check import Missing, cost, missing
from lightning_examples.paper.experiments import MODEL, SIZES, Experiment, Options, chosen, set_up
from lightning_examples.paper.page import page, write_page
from lightning_examples.paper.recipe import CLUSTERS
from lightning_examples.paper.training import Result, failed, part_name, read_result, write_result

SEEDS = {"full": 3, "cores": 1}
"""Trainings of each experiment, where --seeds is not given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, then run every training that has no result yet. The exit code: 0 if all trainings have a result, 1 if something is
    missing or failed, 130 if the command was stopped."""
    given = _parser().parse_args(arguments)
    try:
        experiments, options = chosen(given.experiments), _options(given)
        seeds = SEEDS[options.size] if given.seeds is None else given.seeds
        for option, number in (("seeds", seeds), ("steps", options.steps), ("held-out", options.held_out)):
            if number is not None and number < 1:
                raise ConfigError(f"--{option} {number}: give a number of 1 or more")
        if absent := missing(experiments, options, seeds, given.out):
            _list(absent)
            return 1
        if given.check:
            say(escape(f"Nothing is missing. {cost(experiments, options, seeds)}"))
            return 0
        return _try(experiments, options, given.out) if given.dev else _run(experiments, options, seeds, given.out)
    except LightningError as error:
        fail(str(error))
        return 1
    except KeyboardInterrupt:
        fail("stopped; nothing that was recorded is lost. Go on with the same command")
        return 130


def _run(experiments: Sequence[Experiment], options: Options, seeds: int, out: Path) -> int:
    # In the order of seeds, so that whoever stops early has all experiments.
    parts = [(each, seed) for seed in range(seeds) for each in experiments]
    told = cost(experiments, options, seeds)  # settings that are none are refused here, before anything is written
    with claim_folder(out):
        options.keep(out)
        say(escape(told))
        results = {(each.name, seed): read_result(_file(out, each, seed)) for each, seed in parts}
        for each, seed in parts:
            known = results[each.name, seed]
            name = part_name(each, seed)
            if known is not None and not known["error"]:
                say(escape(f"{name}: has a result of {known['ended']}"))
                continue
            say(f"[bold]{escape(f'{name}: {each.title}, seed {seed}')}[/bold]")
            result = results[each.name, seed] = _train(each, seed, out)
            if result["error"]:
                warn(f"{name} failed, and the others go on: {result['error']}")
            write_page(page(experiments, seeds, results, options), out)
        text = page(experiments, seeds, results, options)
        say(escape(f"\n{text}\nWritten to {write_page(text, out)}"))
    return 0 if all(result and not result["error"] for result in results.values()) else 1


def _train(experiment: Experiment, seed: int, out: Path) -> Result:
    """Train in a process of its own, so that a crash, or a shortage of memory, ends this training alone."""
    file = _file(out, experiment, seed)
    file.unlink(missing_ok=True)  # the error of an earlier try
    command = [sys.executable, "-m", "lightning_examples.paper.training", str(out), experiment.name, str(seed)]
    # It ends when its standard input does, also when this process is killed.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:  # noqa: S603 — ourselves
        try:
            code = process.wait()
        finally:
            end([process])  # by Ctrl-C: it may save its work
    result = read_result(file)
    if result is None:
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        result = failed(experiment, seed, f"its process ended {how} and left no result; its output above says more")
        write_result(file, result)
    return result


def _try(experiments: Sequence[Experiment], options: Options, out: Path) -> int:
    """Run each agent on a few tasks, without training."""
    good = []
    for each in experiments:
        made = set_up(each, options, 0)
        trainer = lightning.Trainer(
            made.model, made.algorithm, train_agents=made.train_agents, engine=made.engine,
            out=out / "dev" / each.name, config=made.config,
        )  # fmt: skip
        good.append(trainer.dev(made.agent, made.train).ok)
    return 0 if all(good) else 1


def _file(out: Path, experiment: Experiment, seed: int) -> Path:
    return out / f"{part_name(experiment, seed)}.json"


def _list(absent: Sequence[Missing]) -> None:
    for each in absent:
        say(f"[bold yellow]{escape(each.name)}[/] {escape(each.found)}\n    {escape(each.cure)}")
    fail(f"{len(absent)} {'thing is' if len(absent) == 1 else 'things are'} missing, so nothing was begun")


def _options(given: argparse.Namespace) -> Options:
    if given.size == "cores":
        for option in ("model", "cluster"):
            if getattr(given, option) is not None:
                raise ConfigError(
                    f"--{option} is for --size full: two cores train the shipped models. Leave one of both out"
                )
    return Options(
        given.size,
        given.cluster or "1x1",
        given.model or MODEL,
        str(given.data),
        given.store,
        given.steps,
        given.held_out,
        tuple(given.set),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightning_examples.paper", description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="NAME", help="spider, musique, calcx; none: all three")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder that has spider, musique and calcx")
    parser.add_argument("--out", type=Path, default=Path("runs/paper"), help="the folder of all results and trainings")
    parser.add_argument(
        "--size", choices=SIZES, default="full", help="cores: the shipped models and tasks, on two cores"
    )
    parser.add_argument("--cluster", choices=CLUSTERS, help="machines x GPUs of each; default: 1x1")
    parser.add_argument("--model", help=f"a folder, or a name on the hub; default: {MODEL}")
    parser.add_argument("--seeds", type=int, help="trainings of each experiment; default: 3, and 1 with --size cores")
    parser.add_argument("--steps", type=int, help="steps of each training; default: the experiment's own")
    parser.add_argument(
        "--held-out", type=int, help="held-out tasks to evaluate on; default: all, 200 with --size cores"
    )
    parser.add_argument("--store", metavar="URL", help="the database, when --out is on a network share")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--check", action="store_true", help="only say what is missing, and what it would cost")
    parser.add_argument("--dev", action="store_true", help="a few tasks of each experiment, without training")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the training may save its work
    sys.exit(main())

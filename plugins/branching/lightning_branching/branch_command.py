"""`lightning branch`: run a recorded rollout again from one of its calls on, several times.

The invariant: exit code 0 says that every branch is valid and has a reward; 1: some are void or failed; 2: the rollout could
not be branched.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from lightning.cli.output import (
    AsJson,
    LocalRunner,
    SettingsFile,
    escape,
    fail,
    load_agent,
    next_steps,
    print_json,
    print_table,
    say,
    warn,
)
from lightning.config import Config, load_config
from lightning.errors import ConfigError
from lightning.safe_text import counted

from lightning_branching.branch_parent import unused
from lightning_branching.branching import BranchOutcome, BranchReport
from lightning_branching.branching import branch as run_branches
from lightning_branching.prompt_texts import read_prompt, warn_of_name
from lightning_branching.replay_command import Attempt, Place, RunTools

At = Annotated[
    int,
    typer.Option(
        "--at",
        metavar="K",
        help="Number of the call that is made anew; calls are counted from 1, in the order in which they began.",
    ),
]
Prompt = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FILE", help="Replace the prompt of the component NAME by the text in FILE; may be repeated."
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="A model, RUN@STEP or a version of weights, as for `lightning eval`; default: those that answered the call.",
    ),
]
Live = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Start no vLLM: the policy of the rollout's run answers, while its trainer serves the version that answered "
        "the call.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a sampling parameter of the new calls (temperature=0.7), or a setting (runner.timeout=60).",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for vLLM's log and weights that are made again; default: branches, in the run's folder."),
]


def branch(
    rollout: Annotated[str, typer.Argument(help="The rollout's id, as `lightning runs show` lists it.")],
    agent: Annotated[str, typer.Argument(help="The agent as MODULE:FUNCTION, called with (task, llm).")],
    at: At,
    n: Annotated[int, typer.Option("-n", min=1, help="Number of branches.")] = 8,
    where: Place = "runs",
    attempt: Attempt = None,
    edit: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Answer the call with this text instead of sampling it.")
    ] = None,
    prompt: Prompt = None,
    weights: Weights = "",
    live: Live = False,
    set_: Set = None,
    yes: RunTools = False,
    runner: LocalRunner = "process",
    out: Out = None,
    as_json: AsJson = False,
    config: SettingsFile = None,
) -> None:
    """Run a recorded rollout again from one of its calls on, several times: what came before is answered from the record."""
    prompts, (sampling, settings) = _prompts(prompt or []), _split(set_ or [])
    if prompts:
        load_agent(agent)  # so that its components are known
    for name in prompts:
        warn_of_name(name, "branches ask for it only where the agent makes it later")
    if told := unused(dict.fromkeys(each.partition("=")[0].strip() for each in settings), live=live):
        warn(told)

    def configure(base: Config) -> Config:
        return load_config(config, settings, base=base)

    try:
        report = run_branches(
            rollout,
            agent,
            at=at,
            n=n,
            runs=where,
            attempt=attempt,
            edit=edit,
            prompts=prompts,
            sampling=sampling,
            weights=weights,
            live=live,
            settings=configure,
            run_tools=yes,
            runner=runner,
            out=out,
            progress=True,
        )
    except KeyboardInterrupt:
        fail("stopped; branches that had ended are kept, as a run of their own: `lightning runs` lists it")
        raise typer.Exit(130) from None
    if as_json:
        print_json({"report": report, "value": report.mean, "advantage": report.advantage})
    else:
        show(report, where, agent, yes=yes)
    raise typer.Exit(0 if report.valid == len(report.branches) else 1)


def _prompts(given: list[str]) -> dict[str, str]:
    """Read the values of `--prompt` into texts by component. Raises `ConfigError` for a value that is not NAME=FILE or repeats
    a name, `DataError` for a file that cannot be read."""
    found = {}
    for each in given:
        name, equals, file = each.partition("=")
        if not (name and equals and file):
            raise ConfigError(f"--prompt {each!r}: write NAME=FILE, the component's name and a file with the text")
        if name in found:
            raise ConfigError(f"--prompt {each!r}: there is another prompt for {name} already, and it can have one")
        found[name] = read_prompt(Path(file))
    return found


def _split(given: list[str]) -> tuple[dict[str, float | int], list[str]]:
    """Split the values of `--set` into sampling parameters, whose names have no dot, and settings, whose names have a
    section."""
    sampling: dict[str, float | int] = {}
    settings = []
    for each in given:
        name, equals, value = each.partition("=")
        name = name.strip()
        if not equals or "." in name or name in Config.model_fields:
            settings.append(each)
            continue
        sampling[name] = _number(value.strip(), each)
    return sampling, settings


def _number(text: str, given: str) -> float | int:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise ConfigError(f"--set {given}: give a number")


def show(report: BranchReport, where: str, agent: str, *, yes: bool = False) -> None:
    """Print a table of the branches, the value that they estimate, and their warnings. `yes`: their tools may run again."""
    call = f"call {report.at} of {report.calls} ({escape(report.caller)})"
    say(
        f"{counted(len(report.branches), 'branch', 'branches')} of {escape(report.parent)} at {call}, with "
        f"{escape(report.model)}"
    )
    print_table(
        ["branch", "calls", "reward"],
        [[escape(each.id), str(each.calls), _outcome(each)] for each in report.branches],
    )
    if report.mean is not None:
        spread = "" if report.error is None else f" ± {report.error:.3f}"
        what = (
            f"the edited answer to call {report.at}"
            if report.edit is not None
            else f"the state before call {report.at}"
        )
        say(f"[bold]{what} is worth {report.mean:.3f}{spread}[/bold], the mean of {report.valid} valid branches")
    if report.parent_reward is None:
        say("the parent has no reward")
    else:
        beside = "" if report.advantage is None else f", {report.advantage:+.3f} beside them"
        say(f"the parent earned {report.parent_reward:.3f}{beside}")
    began = "did not begin as the parent did"
    for state, one, several in (("void", began, began), ("failed", "has no reward", "have no reward")):
        those = [each for each in report.branches if each.state == state]
        if those:
            forms = f"branch is {state}: it {one}, and is", f"branches are {state}: they {several}, and are"
            say(f"[red]{counted(len(those), *forms)} in no figure. The first:")
            say(f"  {escape(those[0].why)}")
    for warning in report.warnings:
        say(f"[yellow]{escape(warning)}")
    next_steps(
        ("see each branch", ["runs", "show", report.run, "--runs", where]),
        ("run a branch again", ["replay", report.branches[0].id, agent, "--runs", where, *(["--yes"] if yes else [])]),
    )


def _outcome(branch: BranchOutcome) -> str:
    return f"{branch.reward:.3f}" if branch.reward is not None else f"[red]{branch.state}"

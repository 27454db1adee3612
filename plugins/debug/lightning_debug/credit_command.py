"""`lightning credit audit`: execute alternatives at decisions of a recorded run, and say which credit saw what mattered.

The invariant: whatever cannot be audited is refused before a policy server is started. Exit code 0 says that decisions were
executed; 2: they could not be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer
from lightning.asyncio_utils import run_to_end
from lightning.cli.output import (
    AsJson,
    LocalRunner,
    Overrides,
    SettingsFile,
    escape,
    fail,
    import_named,
    load_agent,
    locate,
    next_steps,
    print_json,
    print_table,
    say,
)
from lightning.config import Config, load_config
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.runner.protocol import Agent
from lightning.safe_text import counted
from lightning.store.protocol import Store
from lightning.store.url import redacted
from lightning.trainer.model import policy_set_of
from lightning.trainer.summary import Reporter
from lightning_branching.branch_parent import Parent, config_of, folder_of_run
from lightning_branching.branching import Answering
from lightning_branching.policies import EvaluatedModel, model_at

from lightning_debug.credit_audit import AuditedCall, CreditAudit, Plan, credits_of, execute
from lightning_debug.credit_choice import Choice, choose, read_recorded
from lightning_debug.credit_estimates import Agreement, Measured
from lightning_debug.eval_commands import read_bounds
from lightning_debug.judge import Judge

app = typer.Typer(no_args_is_help=True)
SHOWN: Final = 20
"""Default number of decisions that are listed."""


@app.callback()
def credit() -> None:
    """Measure credit by execution."""


Step = Annotated[int | None, typer.Option(help="The step whose rollouts are audited; default: the last one.")]
HeldOut = Annotated[
    bool, typer.Option("--held-out", help="Audit the evaluation after --step steps instead of the step.")
]
Rollouts = Annotated[int, typer.Option(min=1, help="Number of rollouts, of different tasks as far as possible.")]
Calls = Annotated[
    int | None, typer.Option(min=1, help="Most decisions of each rollout, chosen at random; default: all.")
]
Credits = Annotated[
    list[str] | None,
    typer.Option(help="A credit function to compare beside the run's; may be repeated. Default: all that can be."),
]
JudgeName = Annotated[
    str, typer.Option(metavar="MODULE:JUDGE", help="A lightning.Judge, whose scores are compared as well.")
]
Bounds = Annotated[
    str,
    typer.Option(metavar="LOW,HIGH", help="The lowest and the highest possible return; default: those that are seen."),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder for vLLM's log and weights made again; default: branches, in the run's.")
]


@app.command("audit")
def audit(
    run: Annotated[str, typer.Argument(help="A run's folder, or its id under --runs.")],
    agent: Annotated[str, typer.Argument(help="The run's agent as MODULE:FUNCTION, called with (task, llm).")],
    step: Step = None,
    held_out: HeldOut = False,
    rollouts: Rollouts = 8,
    calls: Calls = None,
    n: Annotated[int, typer.Option("-n", min=2, help="Branches at each state.")] = 16,
    credit: Credits = None,
    judge: JudgeName = "",
    bounds: Bounds = "",
    seed: Annotated[int, typer.Option(help="Seed of the choice of rollouts and decisions.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Most decisions to list.")] = SHOWN,
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", help="Let tools run again if the record does not answer them.")] = False,
    runner: LocalRunner = "process",
    out: Out = None,
    as_json: AsJson = False,
    config: SettingsFile = None,
    set_: Overrides = None,
) -> None:
    """Execute alternatives at decisions of recorded rollouts: which of them mattered, and which credit agrees with that.

    From the state of each decision the agent goes on anew, and so it does after the recorded answer. The advantage of the
    answer is the difference of the mean returns.
    """
    url, run_id = locate(run, runs)
    place = run if Path(run).is_dir() else str(runs / run)
    asked = _Asked(
        url=url,
        run=run_id,
        folder=folder_of_run(run_id, place, url),
        agent_name=agent,
        agent=load_agent(agent),
        step=step,
        held_out=held_out,
        rollouts=rollouts,
        calls=calls,
        n=n,
        credits=tuple(credit or ()),
        judge=_judge(judge),
        bounds=read_bounds(bounds) if bounds else None,
        seed=seed,
        run_tools=yes,
        runner=runner,
        out=out,
        configure=lambda base: load_config(config, set_ or [], base=base),
    )
    try:
        with Reporter() as reporter:
            report = run_to_end(_audited(asked, reporter))
    except KeyboardInterrupt:
        fail("stopped; branches that had ended are kept, as a run of their own: `lightning runs` lists it")
        raise typer.Exit(130) from None
    if as_json:
        print_json(report)
    else:
        show(report, limit)
        next_steps(
            ("see each decision in its rollout", ["console", place]),
            ("see each branch", ["runs", "show", report.branches, "--runs", place]),
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the user asked for. `folder` is the run's; None if it is not on this machine."""

    url: str
    run: str
    folder: Path | None
    agent_name: str
    agent: Agent
    step: int | None
    held_out: bool
    rollouts: int
    calls: int | None
    n: int
    credits: tuple[str, ...]
    judge: Judge | None
    bounds: tuple[float, float] | None
    seed: int
    run_tools: bool
    runner: str
    out: Path | None
    configure: Callable[[Config], Config]


async def _audited(asked: _Asked, reporter: Reporter) -> CreditAudit:
    async with plugins().opened_store(asked.url, make=False) as store:
        plan = await _planned(store, asked)
        for line in (*plan.warnings, _announced(plan)):  # before the minutes that it takes
            reporter.say(line)
        return await execute(store, plan, reporter)


async def _planned(store: Store, asked: _Asked) -> Plan:
    """Return the audit, ready to be executed. Raises `ConfigError` or `DataError` for one that cannot be."""
    run = await store.get_run(asked.run)
    if run is None:
        raise ConfigError(f"the store {redacted(asked.url)} has no run {asked.run}")
    recorded = await read_recorded(store, run, asked.step, held_out=asked.held_out)
    compared, missing = credits_of(recorded, asked.credits, asked.judge)
    choice = await choose(store, recorded, asked.rollouts, asked.calls, asked.seed)
    _check_tools(choice, asked.n, run_tools=asked.run_tools)
    first = choice.decisions[0]
    parent = Parent(asked.url, asked.folder, choice.first, run, first.call, first.prefix)
    config, said = config_of(parent, {}, asked.configure)
    place = (asked.out or (asked.folder or Path("runs")) / "branches").resolve()
    model = await _model(store, parent, choice.version, place / "models", config)
    how = Answering(asked.url, config, model, choice.version, asked.agent, asked.runner, choice.first.prompts, place)
    return Plan(
        recorded, choice, asked.held_out, asked.n, compared, how, asked.agent_name, asked.bounds, (*said, *missing)
    )


def _judge(name: str) -> Judge | None:
    if not name:
        return None
    found = import_named(name, "judge")
    if not isinstance(found, Judge):
        raise ConfigError(f"--judge {name}: a {type(found).__name__} is no lightning.Judge")
    return replace(found, credit="identical")


def _check_tools(choice: Choice, n: int, *, run_tools: bool) -> None:
    """Raise `ConfigError` if tools would run again and `run_tools` is false, because a tool may change something outside."""
    again = {tool for decision in choice.decisions for tool in decision.tools}
    if again and not run_tools:
        raise ConfigError(
            f"these tools of the rollouts run again in {n} branches at each state: {', '.join(sorted(again))}. If that does no "
            "harm, say --yes"
        )


async def _model(store: Store, parent: Parent, version: int, into: Path, config: Config) -> EvaluatedModel:
    """Return the weights that made the decisions. Raises `ConfigError` if they are gone."""
    run = parent.run
    if (whose := run.config.get("evaluates")) and policy_set_of(run.config) is not None:
        raise ConfigError(
            f"{run.id} evaluated all policies of {whose} together, and does not keep their weights: audit the run that trained "
            "them, of which --held-out takes an evaluation"
        )
    if parent.folder is None and version:
        raise ConfigError(
            f"the folder of the run {run.id} is not here, and with it the weights {run.id}@{version}, which made these "
            "decisions: name the run by its folder, where that is"
        )
    try:
        return await model_at(store, parent.run, parent.folder, version, into, config)
    except ConfigError as error:
        raise ConfigError(
            f"the weights {parent.run.id}@{version}, which made these decisions, are gone, and others would make other ones: "
            f"{error}"
        ) from error


def _announced(plan: Plan) -> str:
    decisions, states = plan.choice.decisions, len(plan.states)
    count = len({decision.call.transition.rollout for decision in decisions})
    branches = counted(states * plan.n, "branch", "branches")
    return f"{counted(len(decisions), 'decision')} of {counted(count, 'rollout')}: {branches} from {counted(states, 'state')}"


def show(report: CreditAudit, limit: int) -> None:
    """Print an audit as sentences and tables: the `limit` decisions with the largest advantages, and each credit."""
    what = "the evaluation after" if report.held_out else "step"
    say(
        f"{escape(report.run)}, {what} {report.step}: {counted(len(report.calls), 'decision')} of "
        f"{counted(report.audited, 'rollout')}, executed with {escape(report.weights)}"
    )
    count = sum(call.mattered for call in report.calls)
    share = (
        ""
        if report.share is None
        else f", a share of {report.share.value:.2f}{_within(report.share.interval)} over tasks"
    )
    say(f"[bold]{counted(count, 'decision')} of {len(report.calls)} mattered[/bold]{share}")
    say(
        f"(at most 5 % of these are expected to be chance; {report.alone} have an interval without 0, before the correction "
        f"for {len(report.calls)} comparisons)"
    )
    shown = sorted(report.calls, key=lambda call: -abs(call.advantage))[:limit]
    if shown:
        print_table(
            ["rollout", "call", "agent", "state", "answer", "advantage", "95 % interval", ""],
            [_row(call) for call in shown],
        )
    if len(shown) < len(report.calls):
        say(f"{len(report.calls) - len(shown)} more, with smaller advantages (--limit)")
    _show_agreements(report)
    say(
        f"cost: {counted(report.rollouts, 'branch', 'branches')} ({report.void} void, {report.failed} failed, "
        f"{report.faults} by the policy's own fault), "
        f"{counted(report.tokens, 'sampled token')}, {report.seconds:.0f} s"
    )
    for reason, number in report.left_out.items():
        say(f"[yellow]left out: {number} x {escape(reason)}")
    for warning in report.warnings:
        say(f"[yellow]{escape(warning)}")


def _row(call: AuditedCall) -> list[str]:
    interval = "-" if call.interval is None else "{:+.3f} to {:+.3f}".format(*call.interval)
    worth = f"{call.worth:.3f}{' (1)' if call.last else ''}"
    mattered = "mattered" if call.mattered else ""
    return [
        escape(call.rollout), str(call.number), escape(call.agent), f"{call.value:.3f}", worth, f"{call.advantage:+.3f}",
        interval, mattered,
    ]  # fmt: skip


def _show_agreements(report: CreditAudit) -> None:
    rows = sorted(report.agreements.items(), key=lambda each: each[1].correlation.order)
    if not rows:
        return
    print_table(
        [
            "credit",
            "correlation",
            "95 % interval",
            "ranks",
            "same sign",
            "95 % interval",
            "size",
            "inner calls",
            "less the run's",
        ],
        [_agreement_row(name, found, report.own) for name, found in rows],
        title="How each credit agrees with what was executed",
    )
    if report.ceiling is not None:
        say(
            f"the true advantages would have a correlation of about {report.ceiling:.2f}, since the executed ones are noisy"
        )


def _agreement_row(name: str, found: Agreement, own: str) -> list[str]:
    figures = (found.rank, found.sign, found.size, found.inner)
    rank, sign, size, inner = ("-" if each.value is None else f"{each.value:.2f}" for each in figures)
    better = "-" if found.better.value is None else f"{found.better.value:+.2f} ({_range(found.better)})"
    return [
        escape(f"{name} (the run's)" if name == own else name), *_cells(found.correlation), rank, sign, _range(found.sign),
        size, inner, better,
    ]  # fmt: skip


def _cells(found: Measured) -> tuple[str, str]:
    return "-" if found.value is None else f"{found.value:.2f}", _range(found)


def _range(found: Measured) -> str:
    return "-" if found.interval is None else "{:.2f} to {:.2f}".format(*found.interval)


def _within(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else " ({:.2f} to {:.2f})".format(*interval)

"""`lightning audit`: derive every trained batch again from the store and compare."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from lightning.cli.output import escape, locate, next_steps, print_json, run_words, say, with_store
from lightning.safe_text import counted

from lightning_proof.audit import audit as audit_run


def audit(
    run: Annotated[str, typer.Argument(help="A run's folder, or its id under --runs.")],
    runs: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check that each step trained on exactly what the store has recorded.

    Exit code 1: a token id, a logprob, a reward, a version, a policy or the order differs.
    """
    url, run_id = locate(run, runs)
    report = asyncio.run(with_store(url, lambda store: audit_run(store, run_id)))
    if as_json:
        print_json(report)
    else:
        for finding in report.findings:
            say(f"[red]step {finding.step} {escape(finding.rollout)}[/red] {escape(finding.problem)}")
        for warning in report.warnings:
            say(f"[yellow]warning[/yellow] {escape(warning)}")
        verdict = "[green]as it was trained" if report.ok else f"[red]{len(report.findings)} findings"
        if report.ok and report.changed:
            steps = counted(len(report.changed), "step")
            verdict = f"[yellow]as it was recorded, changed by the loop in {steps}"
        how = (
            "derived again" if report.rederived else "compared (its algorithm has arguments that only code can rebuild)"
        )
        epochs = f" in {report.epochs} config epochs" if report.epochs > 1 else ""
        again = f", trained {counted(report.reused, 'time')} again (declared as reused)" if report.reused else ""
        say(
            f"{escape(report.run)}: {counted(report.steps, 'step')}{epochs}, "
            f"{counted(report.rollouts, 'training rollout')}{again}, {counted(report.calls, 'call')}, "
            f"{counted(report.tokens, 'token')} {how}: {verdict}",
        )
        named = run_words(run, runs)
        if report.ok:
            next_steps(("see each step and rollout", ["runs", "show", *named]))
        else:
            next_steps(("train the run again from its record, and compare the weights", ["replay", *named, "--train"]))
    raise typer.Exit(0 if report.ok else 1)

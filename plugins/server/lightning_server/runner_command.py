"""`lightning runner`: run an agent for Lightning Servers, on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from lightning.cli.output import LocalRunner, Overrides, fail, load_agent, say
from lightning.config import load_config

AgentName = Annotated[
    str,
    typer.Argument(
        help="Your agent as MODULE:FUNCTION; called with (task, llm), returns the reward. Or a program, such as "
        "command:'claude -p {task.input}'."
    ),
]


def runner(
    agent: AgentName,
    server: Annotated[
        str,
        typer.Option(
            metavar="URL[,URL]", help="URL of a Lightning Server; separate several servers of one database by commas."
        ),
    ],
    token_file: Annotated[
        Path | None, typer.Option(help="File with a token of scope runner; default: the variable LIGHTNING_TOKEN.")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            "--run", metavar="RUN", help="Run rollouts of this run only; may be repeated. Default: of all runs."
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Number of agents that run at once (runner.concurrency).")
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapters", metavar="NAME", help="Adapters to install (runner.adapters); may be repeated."),
    ] = None,
    rollouts: Annotated[int | None, typer.Option(help="Stop after this many attempts.")] = None,
    idle: Annotated[float | None, typer.Option(help="Stop after this many seconds without work.")] = None,
    executor: LocalRunner = "process",
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of settings; only the section runner is used.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Run an agent for Lightning Servers. SIGTERM or Ctrl-C drains; a second one stops at once."""
    from lightning_server.client import Client

    client = Client(
        server,
        load_agent(agent),
        token=token_file,
        runs=run or (),
        runner=executor,
        config=load_config(config, set_ or []),
        concurrency=concurrency,
        adapters=adapters,
        rollouts=rollouts,
        idle=idle,
    )
    say(f"running {agent} for {server}; Ctrl-C lets agents end, twice ends them")
    try:
        done = client.run()
    except KeyboardInterrupt:
        fail("ended at once; what was leased has been given back")
        raise typer.Exit(130) from None
    say(
        f"{done.leased} attempts: {done.succeeded} succeeded, {done.failed} failed, {done.cancelled} cancelled, "
        f"{done.retried} to be made again, "
        f"{done.lost} given to others"
    )

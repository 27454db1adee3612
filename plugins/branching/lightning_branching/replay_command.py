"""`lightning replay`: run a recorded rollout again and print where it differs, or train a recorded run again.

The invariant: the store is only read. Exit code 0: the replay equals the recorded rollout, or the trained weights equal the
recorded ones; 1: they differ; 2: the rollout cannot be replayed, or nothing was proven.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from lightning.cli.output import escape, load_agent, locate, next_steps, say, with_store
from lightning.errors import ConfigError, DataError
from lightning.runner.protocol import Agent
from lightning.store.places import run_id_of, store_in
from lightning.store.protocol import Store
from lightning.trainer.agents import HowToCall, of_project
from lightning.trainer.context import epoch_at, read_epochs
from lightning.trainer.plan import TRAIN
from lightning.types import DEFAULT_PROJECT, Json, Rollout, Run
from lightning_resources.operations import get_resource

from lightning_branching.find_rollout import ask_of_rollout
from lightning_branching.recorded import RecordedRollout, read_whole
from lightning_branching.replay import ReplayResult, replay_agent, result_of
from lightning_branching.replay_server import ReplayServer

Place = Annotated[
    str,
    typer.Option(
        "--runs", metavar="PLACE", help="A folder of runs, a run's folder, a database file, or a store's URL."
    ),
]
Attempt = Annotated[int | None, typer.Option(min=1, help="Which attempt; default: the last one.")]
RunTools = Annotated[bool, typer.Option("--yes", help="Let tools run again if the record does not answer them.")]


class Tools(StrEnum):
    """How the agent's tools get their results in a replay: from the record, or by running."""

    RECORDED = "recorded"
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class Found:
    """A recorded rollout, and how its agent ran: its prompts and seed, its adapters and rerouted hosts. `how` is the stored
    record of how the run's agents are called; `settings` are the run's settings at the time of the rollout."""

    recorded: RecordedRollout
    prompts: dict[str, str]
    seed: int | None
    adapters: tuple[str, ...] | None
    reroute: tuple[str, ...]
    how: HowToCall
    run: Run | None
    settings: Mapping[str, Json]

    def replay(self, agent: Agent, **how: Any) -> ReplayResult:
        """Replay the rollout with this agent, under the recorded conditions; `how` are more arguments of `replay_agent`."""
        return replay_agent(
            self.recorded,
            agent,
            adapters=self.adapters,
            reroute=self.reroute,
            prompts=self.prompts,
            seed=self.seed,
            **how,
        )


def replay(
    rollout: Annotated[
        str,
        typer.Argument(help="The rollout's id, as `lightning runs show` lists it; with --train a run's folder or id."),
    ],
    agent: Annotated[
        str, typer.Argument(help="The agent as MODULE:FUNCTION, called with (task, llm). Not with --serve.")
    ] = "",
    where: Place = "runs",
    attempt: Attempt = None,
    until: Annotated[int | None, typer.Option(min=0, help="End the replay after this many calls.")] = None,
    tools: Annotated[
        Tools,
        typer.Option(
            help="What a @lightning.tool does. recorded: it returns its recorded result; live: it runs. Tools of "
            "frameworks always run."
        ),
    ] = Tools.RECORDED,
    yes: RunTools = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Run no agent: print a URL and a key, and answer whoever calls there.")
    ] = False,
    train: Annotated[
        bool,
        typer.Option("--train", help="Train a whole run again from its store, and compare the weights of each step."),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="With --train: the folder of the model that the run began with, if it has moved."),
    ] = None,
    port: Annotated[int, typer.Option(help="With --serve: the port; 0 takes a free one.")] = 0,
    seconds: Annotated[
        float | None, typer.Option(help="With --serve: stop after this many seconds; default: after the last call.")
    ] = None,
) -> None:
    """Run a recorded rollout again, with its model calls answered from the record: no model, no GPU. Or train a run again."""
    if not train and model is not None:
        raise ConfigError("--model is for --train")
    if not serve and (port or seconds is not None):
        raise ConfigError("--port and --seconds are for --serve")
    if train:
        if agent or serve or until is not None or attempt is not None:
            raise ConfigError("--train takes a run alone: leave the agent, --serve, --until and --attempt out")
        raise typer.Exit(_retrain(rollout, where, model))
    if bool(agent) == serve:
        raise ConfigError("give the agent as MODULE:FUNCTION, or --serve for a program that you start yourself")
    found = find(where, rollout, attempt, with_tools=tools is Tools.RECORDED and not serve)
    if serve:
        result = asyncio.run(_serve(found, until, port, seconds))
    else:
        _check_tools(found.recorded, tools, yes=yes)
        recorded_tools = tools is Tools.RECORDED
        result = found.replay(load_agent(agent), until=until, recorded_tools=recorded_tools, run_unrecorded=yes)
    say(escape(str(result)))
    _say_next(rollout, agent, where, yes=yes)
    raise typer.Exit(2 if result.same is None else 0 if result.same else 1)


def _say_next(rollout: str, agent: str, where: str, *, yes: bool) -> None:
    """Print the command that branches at the rollout's first call, if the agent is known."""
    if agent:
        consent = ["--yes"] if yes else []
        next_steps(("try other answers", ["branch", rollout, agent, "--at", "1", "--runs", where, *consent]))


def _retrain(run: str, where: str, model: Path | None) -> int:
    from lightning_branching.retrain import retrain

    place = Path(where)
    folder = next((each for each in (Path(run), place / run) if store_in(each)), place)
    if folder == place and run_id_of(place) == run:
        run = where
    url, run_id = locate(run, place)
    result = asyncio.run(with_store(url, lambda store: retrain(store, run_id, folder, say, model)))
    say(escape(str(result)))
    return 2 if result.equal is None else 0 if result.equal else 1


def find(where: str, rollout: str, attempt: int | None = None, *, with_tools: bool = True) -> Found:
    """Find a rollout in the stores at the place `where`. Raises `ConfigError` if no store has it, `DataError` if it cannot be
    replayed."""
    return found_at(where, rollout, attempt, with_tools=with_tools)[1]


def found_at(
    where: str,
    rollout: str,
    attempt: int | None = None,
    *,
    with_tools: bool = True,
    check: Callable[[Rollout], None] = lambda rollout: None,
) -> tuple[str, Found]:
    """Find a rollout as `find` does, and return it with the URL of its store. `check` is called with the rollout before its
    calls are read, and may raise a `LightningError` to refuse it."""

    async def look(store: Store, known: Rollout) -> Found:
        check(known)
        return await found_in(store, rollout, attempt, with_tools=with_tools)

    return ask_of_rollout(where, rollout, look)


async def found_in(store: Store, rollout: str, attempt: int | None, *, with_tools: bool = True) -> Found:
    """Read a rollout of this store, a branch with the calls that it inherited, and how its agent ran. Raises `DataError` if it
    cannot be replayed."""
    recorded = await read_whole(store, rollout, attempt, with_tools=with_tools)
    run = await store.get_run(recorded.rollout.run)
    how = await HowToCall.of_run(store, recorded.rollout.run)
    seen = of_project(store, DEFAULT_PROJECT if run is None else run.project)
    named = await seen.get_rollout(recorded.rollout.id)
    if named is None:
        raise DataError(f"the rollout {recorded.rollout.id} is gone")

    async def text(name: str, version: int) -> str:
        resource = await get_resource(seen, name, version)
        if resource is None:
            raise DataError(f"version {version} of the prompt {name!r}, which the rollout ran with, is gone")
        return str(resource.content)

    settings = await _settings_of(store, run, recorded.rollout)
    runner = settings.get("runner")
    said = runner if isinstance(runner, Mapping) else {}
    adapters, reroute = said.get("adapters"), said.get("reroute")
    return Found(
        recorded,
        await how.prompts(named, text),
        how.agent_seed(recorded.rollout),
        tuple(map(str, adapters)) if isinstance(adapters, list) else None,
        tuple(map(str, reroute)) if isinstance(reroute, list) else (),
        how,
        run,
        settings,
    )


async def _settings_of(store: Store, run: Run | None, rollout: Rollout) -> Mapping[str, Json]:
    """Return the settings that a run had when it made a rollout; empty if they are not recorded."""
    if run is None:
        return {}
    epoch = epoch_at(await read_epochs(store, run), max(1, rollout.step + (rollout.split != TRAIN)))
    found = epoch.config.get("config")
    return found if isinstance(found, Mapping) else {}


def _check_tools(recorded: RecordedRollout, tools: Tools, *, yes: bool) -> None:
    """Raise `ConfigError` if tools would run again without `--yes`, because a tool may change something outside."""
    ran = [event for event in recorded.tool_events if not event.kind]
    live = {event.name for event in ran if tools is Tools.LIVE or event.call_id}
    if live and not yes:
        raise ConfigError(
            f"these tools of the rollout run again: {', '.join(sorted(live))}. If that does no harm, say --yes. A tool that is "
            "decorated with @lightning.tool alone is answered from the record"
        )


async def _serve(found: Found, until: int | None, port: int, seconds: float | None) -> ReplayResult:
    server = ReplayServer(found.recorded, until, port=port, prompts=found.prompts, seed=found.seed)
    server.diverges = lambda divergence: say(escape(str(divergence)))
    async with server:
        llm = server.llm
        say(f"OPENAI_BASE_URL={llm.base_url}")
        say(f"ANTHROPIC_BASE_URL={llm.base_url.removesuffix('/v1')}")
        say(f"OPENAI_API_KEY={llm.api_key}  (for ANTHROPIC_API_KEY as well)")
        say(f"model: {llm.model}; the task: {escape(str(found.recorded.rollout.task.input))}")
        with suppress(NotImplementedError):  # Windows has no such handlers
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, server.end)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await server.finished()
        return result_of(server)

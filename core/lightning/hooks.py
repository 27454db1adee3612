"""Every hook of lightning, in one place: implement the ones you need with `@lightning.hookimpl`.

A plugin is a module (or object) named by an entry point of the group `lightning`. The entry point's name is the plugin's
name; `name.module` (one dot or more) delays importing the plugin until `module` is imported, as adapters want it:

    [project.entry-points.lightning]
    raw = "lightning_raw"                           # loaded with the plugin manager
    "langchain.langchain_core" = "lightning_langchain:adapter"   # loaded when langchain_core is

`register_*` hooks receive a function `register(name, factory)`, and `register_credits` one `register(name, function)`: a credit
function is called with each group, so it is registered itself and not a class that makes it. A name registered twice is an
error that names both plugins.

A plugin brings a hook of its own as this module does, by `@lightning.hooks.hookspec`, and reads what others register with it
from `lightning.plugins`: `plugins().get("tunes", name)` for `register_tunes`. A plugin that implements the hook of one that may
be absent says `@lightning.hookimpl(optionalhook=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from lightning.errors import import_extra

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
    from lightning.cli.app import Command
    from lightning.cli.check import Check
    from lightning.config import Config, GatewayConfig, RunnerConfig
    from lightning.config.sections import TrainerConfig
    from lightning.credit import Credit
    from lightning.demos import Demo
    from lightning.engines.protocol import Engine
    from lightning.gateway.calls import Parts
    from lightning.gateway.connections import PortGuard
    from lightning.gateway.dialects import Dialect
    from lightning.gateway.policy import Fleet
    from lightning.gateway.stages import CallStage
    from lightning.policy_server.protocol import PolicyServer
    from lightning.policy_server.weights import WeightTransfer
    from lightning.runner.protocol import Agent, Runner
    from lightning.runner.stages import AttemptStage
    from lightning.store.operation import OperationGroup
    from lightning.store.protocol import Store
    from lightning.tracking.protocol import Tracker
    from lightning.trainer.run_server import RunServer
    from lightning.trainer.run_stages import RunStage
    from lightning.trainer.samplers import Asked, Sampler, TaskOrder
    from lightning.trainer.stages import StepStage
    from lightning.types import Caller, Rollout, StepRecord, StepState, Task, ToolEvent

hookspec = pluggy.HookspecMarker("lightning")
hookimpl = pluggy.HookimplMarker("lightning")


def later(place: str, text: str = "") -> Callable[[], Any]:
    """A function that imports what is at `MODULE:NAME` and returns it: a plugin is listed without importing what it brings.

    `text` is its docstring, which for a command is its line in `lightning --help`.
    """
    found = partial(resolve_name, place)
    found.__doc__ = text
    return found


def made_later(place: str, extra: str = "") -> Callable[..., Any]:
    """A factory that imports what is at `MODULE:NAME` when it is called, and calls that with what it was given itself.

    Of a module that needs an `extra` it raises `MissingExtraError` where that is not installed.
    """

    def make(*given: Any) -> Any:
        if extra:
            import_extra(extra, place.partition(":")[0])
        return resolve_name(place)(*given)

    return make


@hookspec
def lightning_install(emit: Callable[[ToolEvent | StepState], None]) -> Callable[[], None]:  # type: ignore[empty-body]
    """Attach to the framework's own callbacks and report tool runs and states through `emit`; return a function that undoes it.

    Called once in the agent's process. Must be idempotent and cheap.
    """


@hookspec(firstresult=True)
def lightning_identify() -> Caller | None:
    """Say which agent is calling. Asked in the very thread or task that is about to send a model request."""


@hookspec(firstresult=True)
def lightning_policy_fault(error: BaseException) -> str | None:
    """Say that the model itself is what an agent failed by: one of the words of `lightning.runner.outcomes.CAUSES`.

    Called in the agent's process, for each exception in the chain of the one that the agent has raised. None for all others.
    """


@hookspec
def register_algorithms(register: Callable[[str, Callable[..., Algorithm | SearchAlgorithm]], None]) -> None:
    """Algorithms for `Trainer(algorithm="name")`: a factory of an `Algorithm`, or of a `SearchAlgorithm`."""


@hookspec
def register_credits(register: Callable[[str, Credit], None]) -> None:
    """Credit assignment functions for `LightningRL(credit="name")`: the function itself, or an object that is called like one.

    It is no factory: a class is refused; register an object of it.
    """


@hookspec
def register_engines(register: Callable[[str, Callable[[Config], Engine]], None]) -> None:
    """Engines for `Trainer(engine="name")`: a function from the configuration to an `Engine`."""


@hookspec
def register_policy_servers(
    register: Callable[[str, Callable[[Path, Config, WeightTransfer, bool], PolicyServer]], None],
) -> None:
    """What serves the policy where lightning starts no vLLM, by the scheme of the URL `policy_server.attach`.

    The factory gets the folder of the model, the configuration, how new weights come to the server, and whether its weights
    are the run's to change (else they are somebody else's). It makes a `lightning.policy_server.protocol.PolicyServer`, not
    started yet. It raises `ConfigError` for settings that cannot be met.
    """


@hookspec
def register_weight_transfers(
    register: Callable[[str, Callable[[Config, object | None], WeightTransfer]], None],
) -> None:
    """How new weights come to a vLLM, for `policy_server.weight_transfer`: a function from the configuration to a
    `lightning.policy_server.weights.WeightTransfer`.

    It also gets what the engine's `sender` has made (`lightning.engines.protocol.SendsWeights`): the process that writes the
    weights, where that is not this one (None). A transfer names what `vllm serve` needs for it, and the class that stands in
    vLLM's workers for it; whoever starts vLLM gives it these, and nothing that comes later names a class.
    """


@hookspec
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """Stores by URL scheme: a function from the URL to a `Store`."""


@hookspec
def register_operations(register: Callable[[str, Callable[[], OperationGroup]], None]) -> None:
    """Operations that every store is to have beside its own, with tables, keys and routes of their own: `register("notes",
    lambda: NOTES)`, a function that gives a `lightning.store.operation.OperationGroup` of that name.

    Each operation is a typed function of the plugin, `await put_note(store, note)`, and says itself whose its things are. A
    store that the plugin has no part for, and a server without the plugin, say so by name. An operation that two plugins bring,
    or that is the store's own, is an error at a server's start.
    """


@hookspec
def register_runners(register: Callable[[str, Callable[[Agent, Config], Runner]], None]) -> None:
    """Runners for `Trainer(runner="name")`: a function from the agent and the configuration to a `Runner`."""


@hookspec
def register_servers(register: Callable[[str, Callable[[], RunServer]], None]) -> None:
    """What lets others in than the agents of a trainer's process: a function that makes a
    `lightning.trainer.run_server.RunServer`.

    Asked where clients are to run agents (`runner="remote"`, `server.port`), for a project but the default one, and for a port
    beyond this machine. One plugin can be it; a training that needs none of this asks nobody.
    """


@hookspec
def register_fleets(register: Callable[[str, Callable[[], Fleet]], None]) -> None:
    """Whose servers answer besides a gateway's own, and who else must hold calls while weights change: a function that makes a
    `lightning.gateway.policy.Fleet`.

    Asked when a trainer opens and when a gateway is made. One plugin can be it; without one a trainer's gateway is the only one
    before its policy, and keys of other runs are refused.
    """


@hookspec
def register_ports(register: Callable[[str, PortGuard], None]) -> None:
    """What stands before every route of a port, and how long its clients may take: a function that makes of the port's
    application and the settings `gateway.limits` the application that stands before it, and the HTTP protocol that is spoken on
    the connections, as uvicorn takes it (`lightning.gateway.connections.PortGuard`).

    Asked for each port. One plugin can be it; without one a port listens on loopback alone, and those settings are refused that
    only a guard carries out.
    """


@hookspec
def register_agents(register: Callable[[str, Callable[[str], Agent]], None]) -> None:
    """Agents that are named on the command line as `NAME:TEXT`: a function from the text to an agent.

    A plain `MODULE:FUNCTION` stays what it is where no plugin registers a name like the module's. The function raises
    `ConfigError` for a text that it cannot use.
    """


@hookspec
def register_tasks(register: Callable[[str, Callable[[str], Sequence[Task]]], None]) -> None:
    """Where tasks come from that are no file of JSON lines, for `--tasks NAME:TEXT`: a function from the text to the tasks."""


class RegisterTracker(Protocol):
    """What `register_trackers` is given."""

    def __call__(self, name: str, make: Callable[[Config], Tracker], /, *, usual: bool = False) -> None:
        """Register a tracker. A `usual` one receives the metrics of runs that name none."""


@hookspec
def register_trackers(register: RegisterTracker) -> None:
    """Where metrics go besides the store, for `trackers=["name"]`; with `register(name, make, usual=True)` also where a user
    names none.

    One that also has a coroutine `attempt(record, store)` hears of finished rollouts
    (`lightning.tracking.protocol.RolloutTracker`), one with `alert(alert)` of alarms (`AlertTracker`).
    """


@hookspec
def register_commands(register: Callable[[str, Callable[[], Command]], None]) -> None:
    """Commands for `lightning NAME`: a function that imports and returns the command, which is a function or a `typer.Typer`.

    The first line of its docstring is the command's line in `lightning --help`, for which nothing else of it is run.
    """


@hookspec
def register_checks(register: Callable[[str, Callable[[str | None], Iterable[Check]]], None]) -> None:
    """What `lightning doctor` looks at, by name: a function that yields `lightning.cli.check.Check`s, its findings.

    It gets None and should take a moment; or the WHAT of `--try NAME=WHAT`, which may be empty, and may take minutes.
    """


@hookspec
def register_dialects(register: Callable[[str, Callable[[GatewayConfig], Dialect]], None]) -> None:
    """APIs that the gateway speaks besides OpenAI's chat, by their path: `register("responses", Responses)`
    makes it answer POSTs to `/v1/responses`.

    The factory makes a `lightning.gateway.dialects.Dialect` of `lightning.config.GatewayConfig`, one for each gateway. Two of
    one path are an error at the start.
    """


@hookspec
def register_routes(register: Callable[[str, Callable[[Parts], ASGIApp]], None]) -> None:
    """What else the gateway answers to a POST, by its path below a version: `register("messages/count_tokens", CountTokens)`;
    to a GET with `GET ` before the path: `register("GET tool_runs", ToolRuns)`.

    The factory makes an ASGI application of `lightning.gateway.calls.Parts`, what every call of that gateway goes through. Who
    may ask is the application's to check, by `parts.identity`; what it answers is no call, and is not recorded.
    `parts.identity.watch` tells it of the agents' keys, and what it pushes on `parts.closing` is closed with the gateway.
    """


@hookspec
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Where a plugin stands in the line of each model call: `register("texts", make_texts)`.

    The factory makes a `lightning.gateway.stages.CallStage` of `lightning.gateway.calls.Parts`, once for each gateway; None
    where that gateway's settings do not need it. It raises `ConfigError` for settings that cannot be met, and opens nothing:
    before a run starts, a gateway that is not used is made to see that. A stage that raises fails the call, or the attempt that
    has ended. Which stages stand before or after it the stage says itself; what is not said is refused at the start, unless
    `gateway.stage_order` says it.
    """


@hookspec
def register_attempt_stages(register: Callable[[str, Callable[[RunnerConfig], AttemptStage | None]], None]) -> None:
    """Where a plugin stands around each attempt: `register("sandbox", make_sandbox)`.

    The factory makes a `lightning.runner.stages.AttemptStage` of the settings `runner`, once for each runner; None where they
    do not need it. It opens nothing. A stage that raises ends the attempt, which is made again. Which stages stand before or
    after it the stage says itself; what is not said is refused at the start, unless `runner.stage_order` says it.
    """


@hookspec
def register_run_stages(register: Callable[[str, Callable[[Config], RunStage | None]], None]) -> None:
    """Where a plugin stands at a run's beginning and end: `register("resources", make_stage)`.

    The factory makes a `lightning.trainer.run_stages.RunStage` of the settings, None where they do not need it. It finds the
    prompts that a run's agents are given or the teacher that its algorithms learn from, brings what the run begins with in
    place of its model (`--from`), takes recorded steps again where a run goes on, so that not each needs a checkpoint, or
    hears where the run's model lies at its end. A stage that raises ends the run.
    """


@hookspec
def register_step_stages(register: Callable[[str, Callable[[Config], StepStage | None]], None]) -> None:
    """Where a plugin stands at each step, between its computation and its commit: `register("lengths", make_lengths)`.

    The factory makes a `lightning.trainer.stages.StepStage` of the settings, once for each run; None where they do not need it.
    It raises `ConfigError` for settings that cannot be met, and opens nothing: before a run starts, a stage that is not used is
    made to see that. A stage that raises ends the run, and its step is not committed. Which stages stand before or after it the
    stage says itself; what is not said is refused at the start, unless `trainer.stage_order` says it.
    """


@hookspec
def register_samplers(register: Callable[[str, Callable[[Asked], Sampler | None]], None]) -> None:
    """Where a training's groups come from: `register("async", make_sampler)`.

    The factory makes a `lightning.trainer.samplers.Sampler` of what a run asks for, once for each run, and opens nothing; None
    where that run does not ask for it. It raises `ConfigError` for settings that cannot be met. A run has one sampler: two are
    an error at the start, and so is a setting that the sampler does not carry out. One that raises ends the run's step.
    """


@hookspec
def register_orders(register: Callable[[str, Callable[[Sequence[Task], TrainerConfig], TaskOrder]], None]) -> None:
    """Orders of tasks for `trainer.order = "name"`: a function from the run's tasks and the settings `trainer` to a
    `lightning.trainer.samplers.TaskOrder`, called once for each run. One that raises ends the run's step."""


@hookspec
def register_demos(register: Callable[[str, Callable[[], Demo]], None]) -> None:
    """Demonstrations for `lightning demo NAME`."""


@hookspec
def lightning_redact(text: str, where: str) -> str | None:
    """Return what is to be stored instead of a text, or None to leave it as it is.

    Asked of every text of an attempt before it is stored, after credentials were left out of it: `where` is `outcome.error`,
    `tool.arguments`, `tool.output`, `tool.result`, `tool.error`, `state`, `request`, `reply`, `span.name`, `span.error`,
    `span.attributes` or `conversation`. Each plugin gets what the one before made of it; when one raises, the text is not
    stored. A conversation, said through the Responses API, is stored as it is or not at all. What a request, a reply or a
    result is stored without cannot be replayed. Tasks and token ids cannot be redacted.
    """


@hookspec
def rollout_finished(rollout: Rollout) -> None:
    """A rollout has succeeded or failed for good.

    Called in the trainer, on the event loop that also answers the agents' requests: return at once, and leave what takes time
    (a request to a slow service) to a thread.
    """


@hookspec
def step_finished(record: StepRecord) -> None:
    """An optimizer step has been committed.

    Called as `rollout_finished` is: return at once. What it raises is logged; it cannot change or stop the run.
    """

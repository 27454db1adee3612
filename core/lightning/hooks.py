"""Every hook of lightning, in one place: implement the ones you need with `@lightning.hookimpl`.

A plugin is a module (or object) named by an entry point of the group `lightning`. The entry point's name is the plugin's name;
`name.module` (one dot or more) delays importing the plugin until `module` is imported, as adapters need:

    [project.entry-points.lightning]
    raw = "lightning_raw"                           # loaded with the plugin manager
    "langchain.langchain_core" = "lightning_langchain:adapter"   # loaded when langchain_core is

`register_*` hooks receive a function `register(name, factory)`. `register_credits` receives `register(name, function)`: a
credit function is called with each group, so the function itself is registered and not a class that makes it. A name registered
twice is an error that names both plugins. The factory of a stage or a sampler returns None where it is not needed, raises
`ConfigError` for settings that cannot be met, and opens nothing: before a run starts it is called only to check that.

A plugin can add a hook of its own as this module does, by `@lightning.hooks.hookspec`, and reads what others register with it
from `lightning.plugins`: `plugins().get("tunes", name)` for `register_tunes`. A plugin that implements the hook of a plugin
that may be absent says `@lightning.hookimpl(optionalhook=True)`.
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
    from contextlib import AbstractAsyncContextManager

    from starlette.types import ASGIApp

    from lightning import Session, Trainer
    from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
    from lightning.batch.masks import SamplingMask
    from lightning.cli.app import Command
    from lightning.cli.check import Check
    from lightning.config import Config, GatewayConfig, PluginSettings, RunnerConfig
    from lightning.config.sections import TrainerConfig
    from lightning.credit import Credit
    from lightning.demos import Demo
    from lightning.engines.protocol import Engine, Head
    from lightning.gateway.calls import Parts
    from lightning.gateway.connections import PortGuard
    from lightning.gateway.dialects import Dialect
    from lightning.gateway.policy import Fleet
    from lightning.gateway.stages import CallStage
    from lightning.policy_server.policies import PolicySet
    from lightning.policy_server.protocol import PolicyServer
    from lightning.policy_server.servers import ServerSet
    from lightning.policy_server.vllm_arguments import ServerPart
    from lightning.policy_server.weights import WeightTransfer
    from lightning.runner.protocol import Agent, Runner
    from lightning.runner.stages import AttemptStage
    from lightning.store.operation import OperationGroup
    from lightning.store.protocol import Store
    from lightning.tracking.protocol import Tracker
    from lightning.trainer.agents import RunServer
    from lightning.trainer.loop import Loop
    from lightning.trainer.run_stages import RunStage
    from lightning.trainer.samplers import Asked, Sampler, TaskOrder
    from lightning.trainer.stages import StepStage
    from lightning.types import Caller, Rollout, StepRecord, StepState, Task, ToolEvent, Transition

    MakeSession = Callable[
        [Trainer, Sequence[Task], AbstractAsyncContextManager[Loop]], AbstractAsyncContextManager[Session]
    ]

hookspec = pluggy.HookspecMarker("lightning")
hookimpl = pluggy.HookimplMarker("lightning")


def later(place: str, text: str = "") -> Callable[[], Any]:
    """Return a function that imports the object at `MODULE:NAME` and returns it, so that a plugin is listed without that
    import.

    `text` is the function's docstring, which for a command is its line in `lightning --help`.
    """
    found = partial(resolve_name, place)
    found.__doc__ = text
    return found


def made_later(place: str, extra: str = "") -> Callable[..., Any]:
    """Return a factory that imports the object at `MODULE:NAME` when it is called, and calls it with its own arguments.

    If the module needs an `extra` that is not installed, the factory raises `MissingExtraError`.
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
    """Say which agent is calling; None if unknown. Called in the very thread or task that is about to send a model request."""


@hookspec(firstresult=True)
def lightning_untrained() -> str | None:
    """Say that the model request that is about to be sent is not to be trained, and why: `"title"` for a title that the
    framework asks for itself. None for any other request. Called where `lightning_identify` is.

    A framework whose method can be replaced needs no hook: call the method inside `lightning.untrained("title")`.
    """


@hookspec(firstresult=True)
def lightning_policy_fault(error: BaseException) -> str | None:
    """Say that the model itself caused this error of an agent: return one of the words of `lightning.runner.outcomes.CAUSES`.

    Called in the agent's process, for each exception in the chain of the one that the agent has raised. Return None for others.
    """


@hookspec
def lightning_warm() -> None:
    """Fill the caches that any model call of the framework's client fills, so that not each agent's process fills its own.

    Called in the process from which agents' processes are forked, once it has imported what the first rollout had imported.
    Import nothing else, take fixed text, send nothing, make no client and start no thread.
    """


@hookspec
def register_algorithms(register: Callable[[str, Callable[..., Algorithm | SearchAlgorithm]], None]) -> None:
    """Register algorithms for `Trainer(algorithm="name")`: factories of an `Algorithm`, or of a `SearchAlgorithm`."""


@hookspec
def register_credits(register: Callable[[str, Credit], None]) -> None:
    """Register credit assignment functions for `LightningRL(credit="name")`: the function itself, or an object that can be
    called.

    A class is refused, since no factory is expected here; register an object of the class.
    """


@hookspec
def register_engines(register: Callable[[str, Callable[[Config], Engine]], None]) -> None:
    """Register engines for `Trainer(engine="name")`: functions from the configuration to an `Engine`."""


@hookspec
def register_heads(register: Callable[[str, Callable[[Config], Head]], None]) -> None:
    """Register heads, which engines train beside the policy on the model's hidden states: `register("critic", critic_head)`.

    The factory makes a `lightning.engines.protocol.Head` from the configuration. An engine gets the head that the run's
    algorithm, or its credit function, names as its `head`.
    """


@hookspec
def register_policy_servers(
    register: Callable[[str, Callable[[Path, Config, WeightTransfer, bool], PolicyServer]], None],
) -> None:
    """Register clients for policy servers that lightning does not start, by the scheme of the URL `policy_server.attach`.

    The factory gets the folder of the model, the configuration, how new weights come to the server, and whether the run may
    change the server's weights (else somebody else may). It makes a `lightning.policy_server.protocol.PolicyServer`, not
    started yet. It raises `ConfigError` for settings that cannot be met.
    """


@hookspec
def register_placements(register: Callable[[str, Callable[..., PolicyServer]], None]) -> None:
    """Register where lightning starts vLLM other than on this machine, by the names for `policy_server.placement`: functions
    with the arguments of `lightning.policy_server.vllm_server.OwnedVLLM`.

    The function makes a `lightning.policy_server.protocol.PolicyServer`, not started yet, which starts vLLM at that place,
    copies its output to the `log`, and ends it. After `restart` it may have another URL. The function raises `ConfigError` for
    settings that cannot be met.
    """


@hookspec
def register_server_sets(register: Callable[[str, Callable[[], ServerSet]], None]) -> None:
    """Register how a run has several policy servers: a function that makes a `lightning.policy_server.servers.ServerSet`.

    It turns the settings of a run into those of each server. The core makes a server from each, and holds, updates and
    restarts them. Which of them gets the calls of an attempt is the choice of a stage (`CallStage.placed`). At most one plugin
    may register one. Without one a policy has one server.
    """


@hookspec
def register_policy_sets(register: Callable[[str, Callable[[Config], PolicySet | None]], None]) -> None:
    """Register how a run has several policies: a function from the configuration to a
    `lightning.policy_server.policies.PolicySet`, or None where the run has one.

    It makes one engine for all of them, and says which models need servers of their own and how weights come into each. Which
    policy answers a call is the choice of a call stage (`Call.policy_name`). At most one plugin may register one.
    """


@hookspec
def register_weight_transfers(
    register: Callable[[str, Callable[[Config, object | None], WeightTransfer]], None],
) -> None:
    """Register ways for new weights into a vLLM, for `policy_server.weight_transfer`: functions from the configuration to a
    `lightning.policy_server.weights.WeightTransfer`.

    The function also gets what the engine's `sender` has made (`lightning.engines.protocol.SendsWeights`): the process that
    writes the weights; None if that is this process. A transfer names the arguments that `vllm serve` needs for it, and its
    class for vLLM's workers. Only whoever starts vLLM passes these on; no later request can name a class.
    """


@hookspec
def register_stores(register: Callable[[str, Callable[[str], Store]], None]) -> None:
    """Register stores by URL scheme: functions from the URL to a `Store`."""


@hookspec
def register_operations(register: Callable[[str, Callable[[], OperationGroup]], None]) -> None:
    """Register operations that every store gets besides its own, with their own tables, keys and routes: `register("notes",
    lambda: NOTES)`, a function that returns a `lightning.store.operation.OperationGroup` of that name.

    Each operation is a typed function of the plugin, `await put_note(store, note)`, and itself says to whom its data belongs. A
    store for which the plugin has no part, and a server without the plugin, raise an error with the plugin's name. An operation
    that two plugins bring, or that the store has already, is an error at a server's start.
    """


@hookspec
def register_runners(register: Callable[[str, Callable[[Agent, Config], Runner]], None]) -> None:
    """Register runners for `Trainer(runner="name")`: functions from the agent and the configuration to a `Runner`."""


@hookspec
def register_servers(register: Callable[[str, Callable[[], RunServer]], None]) -> None:
    """Register the server by which others than the agents of a trainer's process get in: a function that makes a
    `lightning.trainer.agents.RunServer`.

    It says of which project a run is, whether clients are to run agents, what then stands in for the agents of the trainer's
    process, and whether a port may be beyond this machine. At most one plugin may register one. Without one all agents run in
    the trainer's process, in the default project, on loopback, and anything else is refused by its name.
    """


@hookspec
def register_fleets(register: Callable[[str, Callable[[], Fleet]], None]) -> None:
    """Register the object that knows which servers answer besides a gateway's own, and who else must hold calls while weights
    change: a function that makes a `lightning.gateway.policy.Fleet`.

    Called when a trainer opens and when a gateway is made. At most one plugin may register one. Without one a trainer's gateway
    is the only one before its policy, and keys of other runs are refused.
    """


@hookspec
def register_ports(register: Callable[[str, PortGuard], None]) -> None:
    """Register the guard of ports, which checks each request before every route and limits the time of clients: a function that
    gets the port's application and the settings `gateway.limits`, and returns the application to put before it, and the HTTP
    protocol class for uvicorn (`lightning.gateway.connections.PortGuard`).

    Called for each port. At most one plugin may register one; it brings further settings as a class derived from
    `lightning.config.LimitsConfig` (`register_settings`). Without one a port listens on loopback alone.
    """


@hookspec
def register_agents(register: Callable[[str, Callable[[str], Agent]], None]) -> None:
    """Register agents that the command line names as `NAME:TEXT`: functions from the text to an agent.

    A plain `MODULE:FUNCTION` means what it always does, unless a plugin registers a name equal to the module's. The function
    raises `ConfigError` for a text that it cannot use.
    """


@hookspec
def register_settings(register: Callable[[str, Callable[[], type[PluginSettings]]], None]) -> None:
    """Register settings of a plugin, as a table of their own or further keys of a section: `register("notes", later(
    "lightning_notes.config:NotesSettings"))`, a function that returns a class derived from
    `lightning.config.PluginSettings`, which says where the settings stand.

    They are read from TOML, the environment and `--set`, checked and listed as the core's own are; the plugin reads them with
    `NotesSettings.of(config)`. A key that two plugins have is an error that names both. Import little where the class is.
    """


@hookspec
def register_tasks(register: Callable[[str, Callable[[str], Sequence[Task]]], None]) -> None:
    """Register sources of tasks other than files of JSON lines, for `--tasks NAME:TEXT`: functions from the text to the
    tasks."""


class RegisterTracker(Protocol):
    """The function that `register_trackers` gets."""

    def __call__(self, name: str, make: Callable[[Config], Tracker], /, *, usual: bool = False) -> None:
        """Register a tracker. A `usual` tracker receives the metrics of runs that name no trackers."""


@hookspec
def register_trackers(register: RegisterTracker) -> None:
    """Register trackers, which receive metrics besides the store, for `trackers=["name"]`. With `register(name, make,
    usual=True)` a tracker is also used where a user names none.

    A tracker with a coroutine `attempt(record, store)` is also told of finished rollouts
    (`lightning.tracking.protocol.RolloutTracker`), one with `alert(alert)` of alarms (`AlertTracker`).
    """


@hookspec
def register_commands(register: Callable[[str, Callable[[], Command]], None]) -> None:
    """Register commands for `lightning NAME`: a function that imports and returns the command (a function or a `typer.Typer`).

    The first line of the registered function's docstring is the command's line in `lightning --help`, which does not call it.
    """


@hookspec
def register_checks(register: Callable[[str, Callable[[str | None], Iterable[Check]]], None]) -> None:
    """Register checks of `lightning doctor`, by name: a function that yields `lightning.cli.check.Check`s, its findings.

    The function gets None and should take a moment; or the WHAT of `--try NAME=WHAT`, which may be empty, and may take minutes.
    """


@hookspec
def register_masks(register: Callable[[str, Callable[[Transition], SamplingMask]], None]) -> None:
    """Register the reader of the sampling masks that a plugin keeps with calls, by the name of its extra: a function from a
    `lightning.types.Transition` that has this extra to the `lightning.batch.SamplingMask` of its response tokens.

    A call with masks is trained over the ids that each mask keeps, and its logprobs are compared with the trainer's. The
    function raises `DataError` for an extra that it cannot read.
    """


@hookspec
def register_server_parts(register: Callable[[str, Callable[[], ServerPart]], None]) -> None:
    """Register what a plugin needs in the processes of a vLLM that lightning starts: a function that makes a
    `lightning.policy_server.vllm_arguments.ServerPart`.

    It names a middleware for vLLM's API, and a function for its workers. No later request can name either.
    """


@hookspec
def register_dialects(register: Callable[[str, Callable[[GatewayConfig], Dialect]], None]) -> None:
    """Register APIs that the gateway speaks besides OpenAI's chat, by their path: `register("responses", Responses)` makes it
    answer POSTs to `/v1/responses`.

    The factory makes a `lightning.gateway.dialects.Dialect` from `lightning.config.GatewayConfig`, once for each gateway. Two
    APIs with one path are an error at the start.
    """


@hookspec
def register_routes(register: Callable[[str, Callable[[Parts], ASGIApp]], None]) -> None:
    """Register further routes of the gateway: for a POST by the path below a version: `register("messages/count_tokens",
    CountTokens)`; for a GET with `GET ` before the path: `register("GET tool_runs", ToolRuns)`.

    The factory makes an ASGI application from `lightning.gateway.calls.Parts`, the objects that every call of that gateway goes
    through. The application checks who may ask, by `parts.identity`. Its answers are no model calls and are not recorded.
    `parts.identity.watch` tells it of the agents' keys, and what it pushes on `parts.closing` is closed with the gateway.
    """


@hookspec
def register_call_stages(register: Callable[[str, Callable[[Parts], CallStage | None]], None]) -> None:
    """Register stages in the line of each model call: `register("texts", make_texts)`.

    The factory makes a `lightning.gateway.stages.CallStage` from `lightning.gateway.calls.Parts`, once for each gateway. A
    stage that raises fails the call, or the attempt that has ended.
    """


@hookspec
def register_attempt_stages(register: Callable[[str, Callable[[RunnerConfig], AttemptStage | None]], None]) -> None:
    """Register stages around each attempt of an agent: `register("sandbox", make_sandbox)`.

    The factory makes a `lightning.runner.stages.AttemptStage` from the settings `runner`, once for each runner. A stage that
    raises ends the attempt, which is retried.
    """


@hookspec
def register_run_stages(register: Callable[[str, Callable[[Config], RunStage | None]], None]) -> None:
    """Register stages at a run's beginning and end: `register("resources", make_stage)`.

    The factory makes a `lightning.trainer.run_stages.RunStage` from the settings, or None. The stage finds the prompts of a
    run's agents or the teacher of its algorithms, provides what the run starts from in place of its model (`--from`), takes
    recorded steps again when a run resumes, so that not each needs a checkpoint, or is told where the run's model lies at its
    end. A stage that raises ends the run.
    """


@hookspec
def register_step_stages(register: Callable[[str, Callable[[Config], StepStage | None]], None]) -> None:
    """Register stages at each step, between its computation and its commit: `register("lengths", make_lengths)`.

    The factory makes a `lightning.trainer.stages.StepStage` from the settings, once for each run. A stage that raises ends the
    run, and its step is not committed.
    """


@hookspec
def register_samplers(register: Callable[[str, Callable[[Asked], Sampler | None]], None]) -> None:
    """Register samplers, which supply a training's groups: `register("async", make_sampler)`.

    The factory makes a `lightning.trainer.samplers.Sampler` from what a run asks for, once for each run, or None. A run has one
    sampler: two are an error at the start, and so is a setting that the sampler does not carry out. A sampler that raises ends
    the run's step.
    """


@hookspec
def register_orders(register: Callable[[str, Callable[[Sequence[Task], TrainerConfig], TaskOrder]], None]) -> None:
    """Register orders of tasks for `trainer.order = "name"`: functions from the run's tasks and the settings `trainer` to a
    `lightning.trainer.samplers.TaskOrder`, called once for each run. An order that raises ends the run's step."""


@hookspec
def register_sessions(register: Callable[[str, MakeSession], None]) -> None:
    """Register what `Trainer.session` opens: a function that gets the trainer, the held-out tasks, and a context manager that
    opens the run (a `lightning.trainer.loop.Loop`) and ends it, and returns the context manager to return.

    The function raises `ConfigError` for settings that it has no use for, before it opens the run. At most one plugin may
    register one; a training by `Trainer.fit` calls none.
    """


@hookspec
def register_demos(register: Callable[[str, Callable[[], Demo]], None]) -> None:
    """Register demonstrations for `lightning demo NAME`."""


@hookspec
def lightning_redact(text: str, where: str) -> str | None:
    """Return the text to store in place of this one, or None to leave it as it is.

    Called for every text of an attempt before it is stored, after credentials were left out: `where` is `outcome.error`,
    `tool.arguments`, `tool.output`, `tool.result`, `tool.error`, `state`, `request`, `reply`, `span.name`, `span.error`,
    `span.attributes` or `conversation`. Each plugin gets the text as the plugin before left it; when one raises, the text is
    not stored. A conversation of the Responses API is stored unchanged or not at all. A request, reply or result that was
    changed cannot be replayed. Tasks and token ids cannot be redacted.
    """


@hookspec
def rollout_finished(rollout: Rollout) -> None:
    """React to a rollout that has succeeded or failed for good, or was cancelled (`rollout.status`), because a loop of your own
    wanted it no more.

    Called in the trainer, on the event loop that also answers the agents' requests: return at once, and leave slow work to a
    thread, as `threading.Thread(target=post, args=(rollout,)).start()`.
    """


@hookspec
def step_finished(record: StepRecord) -> None:
    """React to an optimizer step that has been committed.

    Called on the same event loop as `rollout_finished`: return at once. An exception is logged; it cannot change or stop the
    run.
    """

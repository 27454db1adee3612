"""Where plugins stand around an attempt: the points, and what happens when a stage fails.

The invariant: stages fail closed. A runner whose stage cannot begin does not start; an attempt around which a stage fails ends
as after any fault of the infrastructure, with the plugin's name as its cause, and is made again. No stage is left out silently,
and a setting that a stage carries out is refused where that stage is not.

    begun      the runner starts: refuse what cannot be                                  (in the runner's process)
    enclosure  a process of agents is about to begin: say what it begins in             (in the runner's process)
    installed  such a process has begun, and has not loaded its agent: attach to it     (in the agents' process)
    around     the agent is about to be called: a context around that                   (in the agents' process)
    noted      the agent has ended: what to tell this stage in the runner's process     (in the agents' process)
    heard      the outcome has come, with that note                                     (in the runner's process)
    closed     the runner ends                                                          (in the runner's process)
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from lightning.errors import ConfigError, RunnerError
from lightning.plugins.stages import Contract, NamedStage, Stage, StageLine
from lightning.runner.agent_serialization import pack_stages
from lightning.types import LLM, Fault, Json, Outcome, Task

if TYPE_CHECKING:
    from lightning.config import RunnerConfig

API: Final = 1
"""The number of this file's contract. A minor release raises it when a stage that was written for it would not do any more what
it did, and the change log says what to change in a stage."""
OF_STAGES: Final = ("sandbox", "sandbox_network", "sandbox_environment", "sandbox_files", "tool_limits")
"""Settings of the runner that stages of plugins carry out."""


class Enclosure(Protocol):
    """What a stage has a process of agents begin in. There is one for each process, which is alone in it, and it ends with that
    process. In there the process is a child of process 1, with process ids of its own."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables in there, but for those of lightning's own."""

    @property
    def inside(self) -> Callable[[socket.socket], None] | None:
        """Called in there when a process of an agent has been forked, with a socket whose other end `attend` gets. It is
        pickled into the process."""

    def start(
        self, command: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Begin the command in there, with no standard input, these descriptors, and these variables besides its own. Killing
        what is returned ends all that is in there."""

    def reaches(self, base_url: str) -> bool:
        """Whether an agent in there can call the gateway at this URL."""

    def url(self, base_url: str) -> str:
        """The gateway's URL as agents in there are to use it."""

    async def attend(self, control: socket.socket) -> Callable[[], None]:
        """Serve what `inside` asks for on a socket that does not block, and return what ends that. `RunnerError` ends the
        process."""


class AttemptStage(Stage):
    """A plugin's place around the attempts of a runner. One is made for each runner; it overrides the methods of the points
    where it stands.

    `begun` and `enclosure` are called in the runner's process. Then the stage is pickled into each process of agents, where
    `installed`, `around` and `noted` are called; with `runner='inline'` that is the runner's own process. So its module is one
    that a new process can import, and should be quick to import. `heard` and `closed` are called in the runner's process.

    `begun` and `enclosure` may raise a `ConfigError` or a `RunnerError`, which ends the run; `around` may raise
    `AttemptRefusedError`, which ends the attempt as it says. Anything else that a method raises is a failure of the plugin.
    """

    files: Collection[str] = ()
    """Files and folders that it reads in the processes of agents, once it has `begun`."""

    async def begun(self) -> None:
        """The runner starts."""

    def enclosure(self, base_url: str, files: Sequence[str]) -> Enclosure:
        """What a process of agents begins in whose first rollout has this gateway; with an empty URL it has none, and only
        shows that the agent can be loaded. Stages read `files` in there. One stage of a runner may stand here."""
        raise NotImplementedError

    def installed(self) -> Callable[[], None]:
        """A process of agents has begun. Returns what undoes it."""
        raise NotImplementedError

    def around(self, task: Task, llm: LLM) -> AbstractContextManager[None] | None:
        """A context around the agent's call, in that call's `contextvars`; None where there is nothing to do. It is entered
        where waiting holds up no other agent, and left on the event loop, if there is one. `llm.extras` has what the gateway's
        stage of the same name says of this attempt (`CallStage.told`)."""

    def noted(self, outcome: Outcome) -> Json:
        """The agent has ended like this. What `heard` is to know besides, as JSON; None for nothing."""

    def heard(self, outcome: Outcome, note: Json) -> None:
        """An attempt has ended whose process was not killed and did not die. The agent could have written the `note` itself."""

    def closed(self) -> None:
        """The runner ends."""


class AttemptRefusedError(RunnerError):
    """A stage ends an attempt before its agent is called. `fault` is whose that is."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault

    def __reduce__(self) -> tuple[type[AttemptRefusedError], tuple[str, Fault]]:
        return type(self), (str(self), self.fault)


class FailedStageError(AttemptRefusedError):
    """A stage failed, and with it the attempt."""

    def __init__(self, message: str, fault: Fault = Fault.INFRASTRUCTURE) -> None:
        super().__init__(message, fault)


CONTRACT: Final = Contract(
    kind=AttemptStage,
    asked="attempt_stages",
    api=API,
    points=("begun", "enclosure", "installed", "around", "noted", "heard", "closed"),
    ordered=("around",),
    setting="runner.stage_order",
    settings=OF_STAGES,
    of_stages=OF_STAGES,
    error=RunnerError,
    of="attempts",
    where="runner",
    failed=FailedStageError,
    passes=(ConfigError, RunnerError),
    alone=(("enclosure", "enclose the processes of agents, which begin in one thing"),),
)


class AttemptLine(StageLine[AttemptStage]):
    """The stages of a runner (`runner.stage_order`). Raises `RunnerError`, as a `StageLine` does."""

    contract = CONTRACT

    def __init__(self, stages: Sequence[NamedStage[AttemptStage]] = (), order: Sequence[str] = ()) -> None:
        super().__init__(stages, order)
        self._enclosing = next(iter(self.at("enclosure")), None)
        self._around = self.at("around")

    @property
    def enclosing(self) -> str:
        """The stage that encloses the processes of agents, for people; empty without one."""
        return self._enclosing.said if self._enclosing else ""

    def refuse_enclosing(self, config: RunnerConfig) -> None:
        """Raise `RunnerError` where a stage would enclose the processes of agents: there are none."""
        if self._enclosing is None:
            return
        asked, plain = self._enclosing.stage.carries_out, type(config)()
        values = [(name, getattr(config, name)) for name in asked if getattr(config, name) != getattr(plain, name)]
        raise RunnerError(
            f"{''.join(f'runner.{name} is {value!r}, and ' for name, value in values)}the stage {self._enclosing.said} "
            "encloses the processes of agents. runner='inline' runs them in this very process: use runner='process', or switch "
            "the stage off by its settings"
        )

    async def begin(self) -> None:
        """See `AttemptStage.begun`. Raises `ConfigError` and `RunnerError`."""
        for each in self.at("begun"):
            with CONTRACT.blaming(each, "begun"):
                await each.stage.begun()

    def enclosure(self, base_url: str) -> Enclosure | None:
        """See `AttemptStage.enclosure`; None where no stage stands there. What fails of it is the stage's failure."""
        if self._enclosing is None:
            return None
        files = [file for each in self.stages for file in each.stage.files]
        with CONTRACT.blaming(self._enclosing, "enclosure"):
            return _Blamed(self._enclosing, self._enclosing.stage.enclosure(base_url, files))

    def check_packing(self) -> None:
        """Raise `RunnerError` for a stage that cannot be pickled into the agents' processes."""
        for each in self.stages:
            try:
                pack_stages(each)
            except Exception as error:
                raise RunnerError(
                    f"the stage {each.said} cannot be sent to agents' processes: {error}. Mend the plugin, or set {each.off}"
                ) from error

    def install(self) -> Callable[[], None]:
        """See `AttemptStage.installed`: all of them, or none. Raises what the first one raises that fails."""
        with ExitStack() as installing:
            for each in self.at("installed"):
                with CONTRACT.blaming(each, "installed"):
                    if not callable(undo := each.stage.installed()):
                        raise TypeError(f"it returned {undo!r} and not what undoes it")
                installing.callback(_undo, each, undo)
            return installing.pop_all().close

    def around(self, task: Task, llm: LLM) -> list[Around]:
        """What the stages put around a call of the agent, to be given to `enter`. Raises `AttemptRefusedError`, also for an
        attempt that is told of a stage which is not here, and nothing else."""
        for name in llm.extras:
            if name not in self.versions:
                raise AttemptRefusedError(
                    f"the gateway tells of the stage {name!r} around this attempt, and no plugin has it here: the stages are "
                    f"{', '.join(self.versions) or 'none'}. Install the plugin where agents run, or take it out of "
                    "LIGHTNING_DISABLE_PLUGINS",
                    Fault.INFRASTRUCTURE,
                )
        found: list[Around] = []
        for each in self._around:
            with _failing(each, "around", llm.api_key):
                if (context := each.stage.around(task, llm)) is not None:
                    found.append((each, context))
        return found

    def noted(self, outcome: Outcome) -> dict[str, Json]:
        """See `AttemptStage.noted`: by the names of the stages that note something. Raises `AttemptRefusedError`."""
        notes: dict[str, Json] = {}
        for each in self.at("noted"):
            with _failing(each, "noted"):
                if (note := each.stage.noted(outcome)) is not None:
                    notes[each.name] = note
        return notes

    def heard(self, outcome: Outcome, notes: Mapping[str, Json]) -> None:
        """See `AttemptStage.heard`. Raises `AttemptRefusedError`."""
        for each in self.at("heard"):
            with _failing(each, "heard"):
                each.stage.heard(outcome, notes.get(each.name))

    def close(self) -> None:
        """See `AttemptStage.closed`. Raises what the first one raises that fails."""
        for each in self.at("closed"):
            with CONTRACT.blaming(each, "closed"):
                each.stage.closed()


Around = tuple[NamedStage[AttemptStage], AbstractContextManager[None]]


def enter(contexts: ExitStack, around: Sequence[Around], llm: LLM) -> None:
    """Enter what stages put around a call of the agent. Raises `AttemptRefusedError` and nothing else, and so does leaving."""
    for each, context in around:
        with _failing(each, "around", llm.api_key):
            context.__enter__()
        contexts.callback(_leave, each, context, llm)


NO_STAGES: Final = AttemptLine()


class _Blamed:
    """An enclosure whose failures are those of its stage."""

    def __init__(self, each: NamedStage[AttemptStage], enclosure: Enclosure) -> None:
        self._each, self._enclosure = each, enclosure

    @property
    def environment(self) -> Mapping[str, str]:
        """See `Enclosure`."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.environment

    @property
    def inside(self) -> Callable[[socket.socket], None] | None:
        """See `Enclosure`."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.inside

    def start(
        self, command: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """See `Enclosure`."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.start(command, pass_fds, environment)

    def reaches(self, base_url: str) -> bool:
        """See `Enclosure`."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.reaches(base_url)

    def url(self, base_url: str) -> str:
        """See `Enclosure`."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.url(base_url)

    async def attend(self, control: socket.socket) -> Callable[[], None]:
        """See `Enclosure`."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return await self._enclosure.attend(control)


def _undo(each: NamedStage[AttemptStage], undo: Callable[[], None]) -> None:
    with CONTRACT.blaming(each, "installed"):
        undo()


def _leave(each: NamedStage[AttemptStage], context: AbstractContextManager[None], llm: LLM) -> None:
    """Leave a context. It is not told what the agent raised, so that it cannot swallow that."""
    with _failing(each, "around", llm.api_key):
        context.__exit__(None, None, None)


@contextmanager
def _failing(each: NamedStage[AttemptStage], point: str, secret: str = "") -> Iterator[None]:
    try:
        yield
    except AttemptRefusedError:
        raise
    except BaseException as error:
        raise FailedStageError(each.failure(point, error, secret=secret)) from error


def attempt_line(config: RunnerConfig) -> AttemptLine:
    """The stages that plugins register, one of each kind for a runner with these settings. Raises what `Contract.made`
    raises."""
    return AttemptLine(CONTRACT.made(config, config), config.stage_order)

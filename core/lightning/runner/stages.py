"""The points around an attempt where stages of plugins are asked, and what happens when a stage fails.

The invariant: stages fail closed. A runner whose stage cannot begin does not start. An attempt around which a stage fails ends
with a fault of the infrastructure that names the plugin, and is retried. No stage is left out silently, and a setting that a
stage carries out is refused where that stage is missing.

    begun      the runner starts: refuse what cannot be done                        (in the runner's process)
    enclosure  a process of agents is about to begin: say what encloses it          (in the runner's process)
    installed  such a process has begun, and has not loaded its agent: attach to it (in the agents' process)
    around     the agent is about to be called: a context around the call           (in the agents' process)
    noted      the agent has ended: a note for this stage in the runner's process   (in the agents' process)
    heard      the outcome has come, with that note                                 (in the runner's process)
    closed     the runner ends                                                      (in the runner's process)
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
"""The version of the contract between a runner and its stages. A minor release raises it when a stage written for the old
version would behave differently, and the change log says what to change in a stage."""


class Enclosure(Protocol):
    """The isolated environment, made by a stage, in which one process of agents runs. It ends with that process. Inside, the
    process is a child of process 1 and has other process ids than outside."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables inside, without those that lightning adds."""

    @property
    def inside(self) -> Callable[[socket.socket], None] | None:
        """The function that each forked process of an agent calls first, inside, with a socket whose other end `attend` gets.
        It is pickled into the process. None for nothing to call."""

    def start(
        self, command: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start the command inside, with no standard input, these descriptors, and these variables besides its own. Killing the
        returned process ends everything inside."""

    def reaches(self, base_url: str) -> bool:
        """Whether an agent inside can call the gateway at this URL."""

    def url(self, base_url: str) -> str:
        """Return the gateway's URL as agents inside must use it."""

    async def attend(self, control: socket.socket) -> Callable[[], None]:
        """Serve the requests of `inside` over a non-blocking socket, and return the function that ends this service. A
        `RunnerError` ends the process."""


class AttemptStage(Stage):
    """A plugin's stage around the attempts of a runner. Each runner makes its own. The stage overrides the methods of the
    points where it is to be asked.

    `begun` and `enclosure` are called in the runner's process. Then the stage is pickled into each process of agents, where
    `installed`, `around` and `noted` are called; with `runner='inline'` that is the runner's own process. So a new process must
    be able to import the stage's module, quickly if possible. `heard` and `closed` are called in the runner's process.

    `begun` and `enclosure` may raise a `ConfigError` or a `RunnerError`, which ends the run; `around` may raise
    `AttemptRefusedError`, which ends the attempt with its fault. Anything else that a method raises is a failure of the plugin.
    """

    files: Collection[str] = ()
    """Files and folders that the stage reads in the processes of agents, known once `begun` was called."""

    async def begun(self) -> None:
        """Prepare for the runner's start, or raise."""

    def enclosure(self, base_url: str, files: Sequence[str]) -> Enclosure:
        """Return the enclosure for a process of agents whose first rollout uses this gateway. An empty URL means no gateway:
        the process only shows that the agent can be loaded. Stages read `files` inside. At most one stage of a runner may have
        this method."""
        raise NotImplementedError

    def installed(self) -> Callable[[], None]:
        """Attach to a process of agents that has just begun. Return the function that undoes this."""
        raise NotImplementedError

    def around(self, task: Task, llm: LLM) -> AbstractContextManager[None] | None:
        """Return a context around the agent's call, in that call's `contextvars`; None for no context. It is entered where
        waiting holds up no other agent, and left on the event loop, if there is one. `llm.extras` has what the gateway's stage
        of the same name says of this attempt (`CallStage.told`)."""

    def noted(self, outcome: Outcome) -> Json:
        """Return a note for `heard`, as JSON, when the agent has ended with this outcome; None for no note."""

    def heard(self, outcome: Outcome, note: Json) -> None:
        """Look at an attempt that has ended, unless its process was killed or died. The agent could have forged the `note`."""

    def closed(self) -> None:
        """Clean up when the runner ends."""


class AttemptRefusedError(RunnerError):
    """Raised by a stage to end an attempt, mostly before its agent is called. `fault` says whose fault that is."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault

    def __reduce__(self) -> tuple[type[AttemptRefusedError], tuple[str, Fault]]:
        return type(self), (str(self), self.fault)


class FailedStageError(AttemptRefusedError):
    """Raised when a stage fails, which fails its attempt."""

    def __init__(self, message: str, fault: Fault = Fault.INFRASTRUCTURE) -> None:
        super().__init__(message, fault)


CONTRACT: Final = Contract(
    kind=AttemptStage,
    asked="attempt_stages",
    api=API,
    points=("begun", "enclosure", "installed", "around", "noted", "heard", "closed"),
    ordered=("around",),
    setting="runner.stage_order",
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
        """The name of the stage that encloses the processes of agents, for messages; empty without one."""
        return self._enclosing.said if self._enclosing else ""

    def refuse_enclosing(self) -> None:
        """Raise `RunnerError` if a stage encloses the processes of agents, in a runner that has no such processes."""
        if self._enclosing is None:
            return
        raise RunnerError(
            f"the stage {self._enclosing.said} encloses the processes of agents. runner='inline' runs them in this very "
            "process: use runner='process', or switch the stage off by its settings"
        )

    async def begin(self) -> None:
        """Call `begun` of each stage. Raises `ConfigError` and `RunnerError`."""
        for each in self.at("begun"):
            with CONTRACT.blaming(each, "begun"):
                await each.stage.begun()

    def enclosure(self, base_url: str) -> Enclosure | None:
        """Return the enclosure of the stage that makes one; None if no stage does. Its later errors are failures of that
        stage."""
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
        """Call `installed` of each stage and return the function that undoes all. Raises the first failure, with all undone."""
        with ExitStack() as installing:
            for each in self.at("installed"):
                with CONTRACT.blaming(each, "installed"):
                    if not callable(undo := each.stage.installed()):
                        raise TypeError(f"it returned {undo!r} and not what undoes it")
                installing.callback(_done, each, "installed", undo)
            return installing.pop_all().close

    def around(self, task: Task, llm: LLM) -> list[Around]:
        """Return the contexts of the stages around a call of the agent, for `enter`. Raises only `AttemptRefusedError`: for a
        stage that refuses or fails, and for an attempt with extras of a stage that is not here."""
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
        """Return the notes of the stages that have one (`AttemptStage.noted`), by name. Raises `AttemptRefusedError`."""
        notes: dict[str, Json] = {}
        for each in self.at("noted"):
            with _failing(each, "noted"):
                if (note := each.stage.noted(outcome)) is not None:
                    notes[each.name] = note
        return notes

    def heard(self, outcome: Outcome, notes: Mapping[str, Json]) -> None:
        """Call `heard` of each stage with its note, if any. Raises `AttemptRefusedError`."""
        for each in self.at("heard"):
            with _failing(each, "heard"):
                each.stage.heard(outcome, notes.get(each.name))

    def close(self) -> None:
        """Call `closed` of each stage. Raises a failure when all of them have been called."""
        with ExitStack() as closing:
            for each in reversed(self.at("closed")):
                closing.callback(_done, each, "closed", each.stage.closed)


Around = tuple[NamedStage[AttemptStage], AbstractContextManager[None]]


def enter(contexts: ExitStack, around: Sequence[Around], llm: LLM) -> None:
    """Enter the contexts of stages around a call of the agent. Entering and leaving raise `AttemptRefusedError` and nothing
    else."""
    for each, context in around:
        with _failing(each, "around", llm.api_key):
            context.__enter__()
        contexts.callback(_leave, each, context, llm)


NO_STAGES: Final = AttemptLine()


class _Blamed:
    """An enclosure whose errors are reported as failures of the stage that made it."""

    def __init__(self, each: NamedStage[AttemptStage], enclosure: Enclosure) -> None:
        self._each, self._enclosure = each, enclosure

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables inside the enclosure."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.environment

    @property
    def inside(self) -> Callable[[socket.socket], None] | None:
        """The function that each forked process calls first."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.inside

    def start(
        self, command: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command in the enclosure."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.start(command, pass_fds, environment)

    def reaches(self, base_url: str) -> bool:
        """Whether agents in the enclosure can call the gateway at this URL."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.reaches(base_url)

    def url(self, base_url: str) -> str:
        """Return the gateway's URL inside the enclosure."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return self._enclosure.url(base_url)

    async def attend(self, control: socket.socket) -> Callable[[], None]:
        """Serve one process in the enclosure."""
        with CONTRACT.blaming(self._each, "enclosure"):
            return await self._enclosure.attend(control)


def _done(each: NamedStage[AttemptStage], point: str, do: Callable[[], None]) -> None:
    with CONTRACT.blaming(each, point):
        do()


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
    """Make the stages that plugins register, for a runner with these settings. Raises what `Contract.made` raises."""
    return AttemptLine(CONTRACT.made(config), config.stage_order)

"""Where plugins stand around an attempt: the points, and what happens when a stage fails.

The invariant: stages fail closed. A runner whose stage cannot begin does not start; an attempt around which a stage fails ends
as after any fault of the infrastructure, with the plugin's name as its cause, and is made again. No stage is left out silently,
and a setting that a stage carries out is refused where that stage is not.

    begun      the runner starts: refuse what cannot be                                  (in the runner's process)
    enclosure  a process of agents is about to begin: say what it begins in             (in the runner's process)
    installed  such a process has begun, and has not loaded its agent: attach to it     (in the agents' process)
    around     the agent is about to be called: a context around that                   (in the agents' process)
"""

from __future__ import annotations

import logging
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from lightning.errors import ConfigError, LightningError, RunnerError
from lightning.plugins import plugins
from lightning.plugins.stages import Contract, NamedStage, Stage, warn_of_order
from lightning.runner.agent_serialization import pack_stages
from lightning.types import LLM, Fault, Task

if TYPE_CHECKING:
    from lightning.config import RunnerConfig

log = logging.getLogger(__name__)

API: Final = 1
"""The number of this file's contract. A minor release raises it when a stage that was written for it would not do any more what
it did, and the change log says what to change in a stage."""
OF_STAGES: Final = ("sandbox", "sandbox_network", "sandbox_environment", "sandbox_files")
"""Settings of the runner that stages of plugins carry out."""
ENCLOSING: Final = "sandbox"
"""The one of them that is carried out by a stage that stands at `enclosure`."""


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
    `installed` and `around` are called; with `runner='inline'` that is the runner's own process. So its module is one that a
    new process can import, and should be quick to import.

    `begun` and `enclosure` may raise a `ConfigError` or a `RunnerError`, which ends the run; `around` may raise
    `AttemptRefusedError`, which ends the attempt as it says. Anything else that a method raises is a failure of the plugin.
    """

    async def begun(self) -> None:
        """The runner starts."""

    def enclosure(self, base_url: str, files: Sequence[str]) -> Enclosure:
        """What a process of agents begins in whose first rollout has this gateway; with an empty URL it has none, and only
        shows that the agent can be loaded. Lightning itself reads `files` in there. One stage of a runner may stand here."""
        raise NotImplementedError

    def installed(self) -> Callable[[], None]:
        """A process of agents has begun. Returns what undoes it."""
        raise NotImplementedError

    def around(self, task: Task, llm: LLM) -> AbstractContextManager[None] | None:
        """A context around the agent's call, in that call's `contextvars`; None where there is nothing to do. It is entered
        where waiting holds up no other agent, and left on the event loop, if there is one. `llm.extras` has what the gateway's
        stage of the same name says of this attempt (`CallStage.told`)."""
        raise NotImplementedError


CONTRACT: Final = Contract(
    kind=AttemptStage,
    api=API,
    points=("begun", "enclosure", "installed", "around"),
    ordered=("around",),
    setting="runner.stage_order",
    settings=OF_STAGES,
    error=RunnerError,
    of="attempts",
    where="runner",
)


class AttemptRefusedError(RunnerError):
    """A stage ends an attempt before its agent is called. `fault` is whose that is."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault

    def __reduce__(self) -> tuple[type[AttemptRefusedError], tuple[str, Fault]]:
        return type(self), (str(self), self.fault)


class FailedStageError(AttemptRefusedError):
    """A stage failed, and with it the attempt."""

    @classmethod
    def at(cls, each: NamedStage[AttemptStage], point: str, error: BaseException, secret: str = "") -> FailedStageError:
        """The failure of a stage at a point; `secret` is left out of what it says."""
        told = f"{type(error).__name__}: {error}".replace(secret or "\0", "<api key>")
        message = f"the stage {each.said} failed ({point}: {told}). Mend the plugin, or start without it: {each.off}"
        return cls(message, Fault.INFRASTRUCTURE)


class AttemptLine:
    """The stages of a runner in their order (`runner.stage_order`). Raises `RunnerError` where that order is not said, for a
    stage that was written for another contract, and for two that both enclose processes."""

    def __init__(self, stages: Sequence[NamedStage[AttemptStage]] = (), order: Sequence[str] = ()) -> None:
        for each in stages:
            CONTRACT.check(each)
        self.stages = CONTRACT.in_order(stages, order)
        if unknown := sorted(set(order) - {each.name for each in stages}):
            log.warning("runner.stage_order names stages that no plugin has here: %s", ", ".join(unknown))
        enclosing = [each for each in self.stages if each.stands_at("enclosure")]
        if len(enclosing) > 1:
            both = " and ".join(each.said for each in enclosing)
            raise RunnerError(
                f"the stages {both} both enclose the processes of agents, which begin in one thing: set {enclosing[0].off}, or "
                f"{enclosing[1].off}"
            )
        self._enclosing = enclosing[0] if enclosing else None
        self._around = [each for each in self.stages if each.stands_at("around")]

    @property
    def versions(self) -> Mapping[str, str]:
        """The names of its stages, in their order, with the versions of their distributions."""
        return {each.name: each.version for each in self.stages}

    @property
    def enclosing(self) -> str:
        """The stage that encloses the processes of agents, for people; empty without one."""
        return self._enclosing.said if self._enclosing else ""

    async def begin(self) -> None:
        """See `AttemptStage.begun`. Raises `ConfigError` and `RunnerError`."""
        for each in self.stages:
            if each.stands_at("begun"):
                with _blamed(each, "begun"):
                    await each.stage.begun()

    def enclosure(self, base_url: str, files: Sequence[str]) -> Enclosure | None:
        """See `AttemptStage.enclosure`; None where no stage stands there. What fails of it is the stage's failure."""
        if self._enclosing is None:
            return None
        with _blamed(self._enclosing, "enclosure"):
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
            for each in self.stages:
                if each.stands_at("installed"):
                    with _blamed(each, "installed"):
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
            with _failing(each, llm):
                if (context := each.stage.around(task, llm)) is not None:
                    found.append((each, context))
        return found


Around = tuple[NamedStage[AttemptStage], AbstractContextManager[None]]


def enter(contexts: ExitStack, around: Sequence[Around], llm: LLM) -> None:
    """Enter what stages put around a call of the agent. Raises `AttemptRefusedError` and nothing else, and so does leaving."""
    for each, context in around:
        with _failing(each, llm):
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
        with _blamed(self._each, "enclosure"):
            return self._enclosure.environment

    @property
    def inside(self) -> Callable[[socket.socket], None] | None:
        """See `Enclosure`."""
        with _blamed(self._each, "enclosure"):
            return self._enclosure.inside

    def start(
        self, command: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """See `Enclosure`."""
        with _blamed(self._each, "enclosure"):
            return self._enclosure.start(command, pass_fds, environment)

    def reaches(self, base_url: str) -> bool:
        """See `Enclosure`."""
        with _blamed(self._each, "enclosure"):
            return self._enclosure.reaches(base_url)

    def url(self, base_url: str) -> str:
        """See `Enclosure`."""
        with _blamed(self._each, "enclosure"):
            return self._enclosure.url(base_url)

    async def attend(self, control: socket.socket) -> Callable[[], None]:
        """See `Enclosure`."""
        with _blamed(self._each, "enclosure"):
            return await self._enclosure.attend(control)


@contextmanager
def _blamed(each: NamedStage[AttemptStage], point: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, RunnerError):
        raise
    except Exception as error:
        log.exception("the stage %s failed (%s)", each.said, point)
        raise FailedStageError.at(each, point, error) from error


def _undo(each: NamedStage[AttemptStage], undo: Callable[[], None]) -> None:
    with _blamed(each, "installed"):
        undo()


def _leave(each: NamedStage[AttemptStage], context: AbstractContextManager[None], llm: LLM) -> None:
    """Leave a context. It is not told what the agent raised, so that it cannot swallow that."""
    with _failing(each, llm):
        context.__exit__(None, None, None)


@contextmanager
def _failing(each: NamedStage[AttemptStage], llm: LLM) -> Iterator[None]:
    try:
        yield
    except AttemptRefusedError:
        raise
    except BaseException as error:
        raise FailedStageError.at(each, "around", error, llm.api_key) from error


def attempt_line(config: RunnerConfig) -> AttemptLine:
    """The stages that plugins register, one of each kind for a runner with these settings. Raises `RunnerError`, and
    `ConfigError` for a setting that is no default and that no stage carries out."""
    named: list[NamedStage[AttemptStage]] = []
    known = plugins().names("attempt_stages")
    for name in known:
        owner = plugins().owner("attempt_stages", name)
        try:
            stage = plugins().attempt_stage(name)(config)
        except LightningError:
            raise
        except Exception as error:
            plugin = NamedStage(name, AttemptStage(), owner.version, owner.name)
            raise RunnerError(
                f"the stage {plugin.said} could not be made ({error!r}): mend the plugin, or set {plugin.off}"
            ) from error
        if stage is not None:
            named.append(NamedStage(name, stage, owner.version, owner.name))
    line, plain = AttemptLine(named, config.stage_order), type(config)()
    warn_of_order(line.stages, known)
    for setting in OF_STAGES:
        carried = any(setting in each.stage.carries_out for each in line.stages)
        idle = not carried or (setting == ENCLOSING and not line.enclosing)
        if idle and (value := getattr(config, setting)) != (off := getattr(plain, setting)):
            raise ConfigError(
                f"runner.{setting} is {value!r}, and no plugin is there that carries it out: the stages around attempts here "
                f"are {', '.join(line.versions) or 'none'}.{plugins().left_out()} Bring the plugin back, or set "
                f"runner.{setting} to {off!r} to go on without it"
            )
    return line

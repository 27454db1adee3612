"""The plugin's step stage: it applies the rules to each step and each dry run, and sends alarms to `trainer.alerts` (a webhook
or a program).

The invariant: a rule sees only what is recorded of the run up to now, so that `lightning advise` finds the same. Training
neither waits for an alert nor fails with it. An alert that could not be sent is logged without its URL, which may be a secret.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

import aiohttp
from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
from lightning.asyncio_utils import end_process
from lightning.config import Config
from lightning.errors import ConfigError
from lightning.plugins import plugins
from lightning.trainer.stack import Stack
from lightning.trainer.stages import Added, Alarm, StepStage, StepTaken
from lightning.trainer.summary import Evaluation, Reporter
from lightning.trainer.weight_sync import bound_of
from lightning.types import Json, Status, Task
from lightning_policies.config import PoliciesConfig

from lightning_debug.call_advice import hidden_tools
from lightning_debug.config import AlertsConfig
from lightning_debug.dev import DevReport, dry_run
from lightning_debug.diagnosis import Attempted, Course, Diagnosis, turns_of
from lightning_debug.garbled import look_at, with_examples
from lightning_debug.rules import diagnose

logger = logging.getLogger(__name__)

Send = Callable[[bytes], Awaitable[None]]
SECONDS: Final = 30.0
"""Seconds that sending an alert may take, and that the end of a run waits for alerts that are being sent."""
WEBHOOK, COMMAND = "webhook:", "command:"


def read_alerts(targets: Sequence[str]) -> list[tuple[str, Send]]:
    """Return the targets of `trainer.alerts` as `(name, function that sends an alert)`. Raises `ConfigError` for a target that
    is neither a webhook nor a command, for an unset variable or a missing program, and for a URL in place of its variable."""
    found: list[tuple[str, Send]] = []
    for target in targets:
        if target.startswith(WEBHOOK):
            found.append((target, _webhook(target.removeprefix(WEBHOOK))))
        elif target.startswith(COMMAND):
            command = target.removeprefix(COMMAND)
            found.append((f"{COMMAND}{command.split(maxsplit=1)[0] if command.strip() else ''}", _command(command)))
        else:
            raise ConfigError(
                "trainer.alerts has something that is neither webhook:NAME (the environment variable with the URL) nor "
                "command:PROGRAM ARGUMENTS"
            )
    return found


def _webhook(variable: str) -> Send:
    if not variable.isidentifier():
        raise ConfigError(
            "webhook: of trainer.alerts does not name an environment variable: give the name of the variable that holds the "
            "URL, not the URL, which may be a secret, and settings are kept with the run"
        )
    url = os.environ.get(variable, "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"the environment variable {variable}, of trainer.alerts, holds no URL: set it to https://..."
        )

    async def send(body: bytes) -> None:
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession(trust_env=True) as session,
            session.post(url, data=body, headers=headers) as answer,
        ):
            if not answer.ok:
                raise RuntimeError(f"it answered {answer.status}")

    return send


def _command(text: str) -> Send:
    if "://" in text:
        raise ConfigError(
            "command: of trainer.alerts has an address in it, which may be a secret, and settings are kept with the run: use "
            "webhook:NAME, or read the address inside of a script"
        )
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"command:{text} of trainer.alerts cannot be read as a command: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"command:{text} of trainer.alerts: there is no program {(words or [''])[0]!r}")

    async def send(body: bytes) -> None:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await process.communicate(body)
        finally:
            await end_process(process)
        if process.returncode:
            raise RuntimeError(f"it ended with {process.returncode}")

    return send


class Alerts:
    """Sends alerts to the targets of one run."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = read_alerts(targets)
        self._telling: set[asyncio.Task[None]] = set()
        self._failed: set[str] = set()

    async def close(self) -> None:
        """Wait up to `SECONDS` for the alerts that are being sent."""
        if self._telling:
            await asyncio.wait(self._telling, timeout=SECONDS)

    def send(self, alert: Mapping[str, Json]) -> None:
        """Start to send an alert to all targets, and return at once."""
        body = json.dumps({**alert}).encode()
        for name, send in self._targets:
            task = asyncio.create_task(self._tell(name, send, body))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, name: str, send: Send, body: bytes) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                await send(body)
        except (OSError, RuntimeError, TimeoutError, aiohttp.ClientError) as error:
            level = logging.INFO if name in self._failed else logging.WARNING
            self._failed.add(name)
            reason = str(error) if isinstance(error, RuntimeError) else type(error).__name__
            logger.log(level, "could not send an alarm to %s: %s. Training goes on; it is logged", name, reason)


class Advice(StepStage):
    """The step stage `advice`, which applies the rules and sends alerts. Raises `ConfigError` for `trainer.alerts` that are not
    valid."""

    api = 1

    def __init__(self, config: Config) -> None:
        self._gap, self._order = bound_of(config), config.trainer.order
        self._policies = PoliciesConfig.of(config).by_name
        self._alerts = Alerts(AlertsConfig.of(config).alerts)
        self._policy_set, self._first = plugins().policy_set(config), 1
        self._steps: list[Mapping[str, float]] = []
        self._evaluations: Sequence[Evaluation] = ()

    async def begun(self, steps: Sequence[Mapping[str, float]], evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """Take the steps and evaluations of a resumed run, and return the alarms that they give."""
        self._steps, self._evaluations, self._first = list(steps), evaluations, len(steps) + 1
        return await self._found()

    async def taken(self, step: StepTaken) -> Added:
        """Apply the rules to a step, and return its alarms, the measures of its answers (`lightning_debug.garbled`) and, if
        tools were hidden from the model, the metric `hidden_tools`."""
        looked = await asyncio.to_thread(look_at, step.groups)
        self._steps[step.step - 1 :] = [{**step.metrics, **looked.recorded}]
        attempts = [Attempted.of(member) for group in step.groups for member in group.trajectories]
        failures = [rollout.error for rollout in step.rollouts if rollout.status is Status.FAILED]
        run = step.rollouts[0].run if step.rollouts else ""
        hidden = await hidden_tools(step.parts, run) if step.parts is not None else 0
        metrics = {**looked.metrics, **({"hidden_tools": float(hidden)} if hidden else {})}
        found = await self._found(attempts, step.train_agents, failures)
        return Added(metrics, alarms=[with_examples(each, looked, self._steps) for each in found])

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> Iterable[Alarm]:
        """Take all evaluations so far, and return the alarms that they give."""
        self._evaluations = evaluations
        return await self._found()

    async def _found(
        self, attempts: Sequence[Attempted] = (), train_agents: Sequence[str] = (), failures: Sequence[str] = ()
    ) -> list[Diagnosis]:
        turns = turns_of(self._policy_set, self._first, len(self._steps))
        course = Course(self._steps, self._evaluations, self._gap, self._order, turns)
        found = await asyncio.to_thread(diagnose, attempts, train_agents, failures, course, self._policies)
        return [diagnosis for diagnosis in found if not diagnosis.minor]

    def alarmed(self, alarm: Mapping[str, Json]) -> None:
        """Send a serious alarm to `trainer.alerts`, in the background."""
        self._alerts.send(alarm)

    async def ended(self) -> None:
        """Wait up to `SECONDS` for alerts that are being sent."""
        await self._alerts.close()

    async def rehearsed(
        self,
        stack: Stack,
        tasks: Sequence[Task],
        train_agents: Sequence[str],
        algorithm: Algorithm | SearchAlgorithm,
        reporter: Reporter,
    ) -> DevReport:
        """Do a dry run of the tasks, and return its report."""
        return await dry_run(stack, tasks, train_agents, algorithm, reporter)

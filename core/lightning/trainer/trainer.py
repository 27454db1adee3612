"""`Trainer`: from an agent and its tasks to a better model, in one call.

The invariant: one folder (`out`) holds everything a run is: database, checkpoints, logs, metrics, final model. The same call
again goes on where it stopped, or begins beside it; no run is written over. A start that fails leaves no run that a corrected
one would stumble over, and nothing open. The state on disk is the one that the run's committed steps lead to, each under its
own settings.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
from lightning.asyncio_utils import one_by_one, run_to_end, together
from lightning.config import Config, load_config, with_settings
from lightning.config.arguments import refuses_unknown
from lightning.engines.protocol import ChecksModel, Engine, Head, SendsWeights
from lightning.errors import ConfigError, DataError
from lightning.plugins import plugins
from lightning.plugins.named import name_of
from lightning.policy_server.auto_settings import shares_gpu
from lightning.policy_server.vllm_server import check_policy_server
from lightning.runner.protocol import Agent, Runner
from lightning.safe_text import counted
from lightning.store.places import DATABASE, RUN_FILE, run_id_of
from lightning.store.protocol import Store
from lightning.store.url import parse, redacted, sqlite_url
from lightning.tracking.trackers import Trackers, names_of
from lightning.trainer.agents import check_server_settings, hidden_from_agents, project_of
from lightning.trainer.algorithm import AlgorithmSchedule, resolve_schedule
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import Epoch, Teacher, base_digest, is_over, keep_epochs, mark_over, reference_of
from lightning.trainer.loop import Loop
from lightning.trainer.model import default_rate, local_model, made_head, optimizer_of, resolve_model, with_dtypes
from lightning.trainer.needs import Need, check_disk, disk_need
from lightning.trainer.plan import as_tasks, task_ids
from lightning.trainer.run_stages import FORKED, PROBES, BringForward, Prompts, RunLine, Start, began_with, run_line
from lightning.trainer.runs import (
    AGENT,
    FolderHeldError,
    agent_of,
    changes_of,
    check_run,
    claim_folder,
    describe_algorithm,
    folders_beside,
    kept_elsewhere,
    name_folder,
    plan_epochs,
    steps_taken,
    why_not_go_on,
)
from lightning.trainer.samplers import RECORDED, Asked, Brought, Sampler, TurnSampler, sampler_of
from lightning.trainer.stack import Stack, check_gateway, open_stack
from lightning.trainer.stages import DryRun, step_line
from lightning.trainer.summary import Reporter, Summary, check_held_out, summarize
from lightning.trainer.training_data import without
from lightning.types import Json, Run, Task, as_texts

if TYPE_CHECKING:
    from lightning import Session
    from lightning.hooks import MakeSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is about to begin, from this `start`. `resources` closes it; `line` has the stages at its beginning and its
    end; `agent` names the agent as MODULE:FUNCTION, empty where another process cannot import it."""

    resources: AsyncExitStack
    start: Start
    epochs: list[Epoch]
    bring_forward: BringForward | None
    line: RunLine
    prompts: Prompts
    agent: str
    runner: Runner
    train: list[Task]
    sampler: Sampler
    teacher: Teacher | None
    began: float


@refuses_unknown
class Trainer:
    """Makes the model behind an agent better by reinforcement learning.

    `model` is a folder with a `transformers` causal LM, or the name of one on a model hub. `algorithm` is an object or the
    name of a registered one, alone or with arguments (`"grpo:group_size=4"`), or several in turn with the steps of each
    (`"sft:2,grpo:20"`; `trainer.steps` is then their sum unless it is set). `adapters` names the adapters to install in the
    agents' processes (default: all found), `train_agents` the agents whose calls are trained on, as globs on the caller path
    (default: all). It freezes none: all are answered by the same weights, unless the settings `policies` give an agent a
    policy of its own. `model:GLOB` is matched with the model that a call asked for, `policy:NAME` with the policy that
    answered, and a glob after `!` takes out what it matches.
    `engine`, `runner` and the scheme of `store` are names of plugins. `config` is a `lightning.config.Config`, a TOML file, or
    settings by name (`{"trainer.eval_every": 5}`); the keyword arguments after it are shortcuts for its commonest fields and
    win over it. `out` is the run's folder; its name at the first start is the run's id. If `out` holds a run already, `resume`
    decides. None goes on with a run that is unfinished and has the same agent and settings, and else begins a new run in
    `out-2` (`out-3`, ...). True goes on with the run, also under other settings. False begins a new run. `fit` says which; the
    attribute `out` then is the folder of its run.
    `from_run` is a run whose weights and optimizer a new one begins with: `"RUN@STEP"`, by its folder or its name beside `out`,
    or `"RUN"` for its last step. `recorded` is a run's folder, a database or its URL (with `#RUN`: of that run alone) whose
    scored rollouts are trained on in place of new ones; the agent then runs for `val` alone, and `trainer.steps` is one pass
    over the record unless it is set.

    Raises `ConfigError` for impossible settings and for what is no algorithm, `PluginError` for unknown names, and
    `GatewayError` for plugins that do not go together in the gateway, before anything is started.
    """

    def __init__(
        self,
        model: str | Path,
        algorithm: Algorithm | SearchAlgorithm | str = "grpo",
        *,
        adapters: Sequence[str] | None = None,
        train_agents: Sequence[str] = (),
        engine: str = "torch",
        runner: str = "process",
        store: str | None = None,
        policy_server: str | Sequence[str] | None = None,
        out: str | Path | None = None,
        resume: bool | None = None,
        from_run: str | None = None,
        recorded: str | None = None,
        config: Config | Mapping[str, object] | str | Path | None = None,
        steps: int | None = None,
        tasks_per_step: int | None = None,
        lr: float | None = None,
        seed: int | None = None,
        concurrency: int | None = None,
        progress: bool = True,
    ) -> None:
        self.train_agents = as_texts(train_agents, "train_agents")
        base = _settings_of(config)
        shortcuts: dict[str, object] = {
            "trainer.steps": steps,
            "trainer.tasks_per_step": tasks_per_step,
            "trainer.seed": seed,
            "engine.lr": lr,
            "runner.concurrency": concurrency,
            "runner.adapters": as_texts(adapters, "adapters") if adapters is not None else None,
            "policy_server.attach": policy_server,
        }
        self.schedule = schedule = resolve_schedule(algorithm)
        if isinstance(schedule, AlgorithmSchedule) and "steps" not in base.trainer.model_fields_set and steps is None:
            shortcuts["trainer.steps"] = schedule.steps
        given = {key: value for key, value in shortcuts.items() if value is not None}
        self.config = with_settings(base, given)
        if (several := plugins().policy_set(self.config)) is not None:
            self.train_agents += without(several.untrained)
        self._project = project_of(self.config)
        _check_settings(self.config, store)
        if resume and out is None:
            raise ConfigError("resume needs the run to go on with: give its folder as `out` (--out runs/NAME)")
        self.algorithm = schedule.at(1) if isinstance(schedule, AlgorithmSchedule) else schedule
        self.model, self._rate_chosen = local_model(model) or Path(model), ""
        self._to_fetch = "" if local_model(model) else str(model)
        if not self._to_fetch:
            self._take_rate()
        self.from_run, self.recorded = from_run, recorded
        if recorded is not None and isinstance(schedule, SearchAlgorithm):
            raise ConfigError("a search for prompts runs its agents: it cannot learn from what was recorded")
        self._steps_set = "steps" in base.trainer.model_fields_set or "trainer.steps" in given
        self.engine = engine
        self._make_engine, self._make_runner = plugins().engine(engine), plugins().runner(runner)
        self._store_url = store
        self.out = Path("runs") / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}" if out is None else Path(out)
        self._asked_out, self.resume, self.progress = self.out, resume, progress

    def fit(self, agent: Agent | None, train: Sequence[Task | Json], val: Sequence[Task | Json] = ()) -> Summary:
        """Train until `trainer.steps`, evaluating on `val`; returns what was achieved.

        `agent(task, llm)` is called in worker processes with a `Task` and an `LLM`; it returns its reward. With
        `runner="remote"` clients call theirs, and `agent` may be None. Interrupting
        (Ctrl-C, SIGTERM) stops cleanly; the same call goes on. Raises `DataError` for an empty task list, `ConfigError` for a
        folder that cannot be written, and what the rooms raise (`PolicyServerError`, `EngineError`, ...).
        """
        try:
            return run_to_end(self._fit(agent, as_tasks(train, "train"), as_tasks(val, "val")))
        except KeyboardInterrupt as stopped:
            stopped.add_note(
                f"nothing that was recorded in {self.out} is lost: the same script again goes on after its last step"
            )
            raise

    def dev(self, agent: Agent | None, tasks: Sequence[Task | Json], *, count: int = 4) -> DryRun:
        """Run the agent on a few tasks against the untrained model, without training, and report what was recorded.

        Use it to see that calls arrive, which agents they come from, and what the reward says, before a long run. An algorithm,
        a credit function or a loss of your own is tried on what was recorded; the first task is then run twice, so that there
        are rollouts to compare. What was recorded, and vLLM's log, stays in `out`/dev: each dry run is a run of its own in the
        store there, which `lightning runs` reads.
        """
        if not tasks:
            raise DataError("the list of tasks is empty: give dev() at least one")
        if self.from_run is not None:
            logger.warning("a dry run asks the model as it is in %s, not the weights of %s", self.model, self.from_run)
        return run_to_end(self._dev(agent, as_tasks(tasks, "tasks")[:count]))

    def summary(self) -> Summary:
        """What the run in `out` has achieved so far."""
        return run_to_end(self._summary())

    async def _fit(self, agent: Agent | None, train: list[Task], val: list[Task]) -> Summary:
        if not train and self.recorded is None:
            raise DataError("the list of training tasks is empty: give fit() at least one task in `train`")
        if train and self.recorded is not None:
            raise DataError("tasks to train on were given, and a record, which has its own: give one of both")
        if self.config.trainer.max_reuse:
            raise ConfigError(
                "Trainer.fit trains each rollout in one step and does not use trainer.max_reuse: leave it out, or write a "
                "loop of your own with a replay buffer (Trainer.session)"
            )
        sampler = None
        if isinstance(self.algorithm, SearchAlgorithm):
            refuse_ends(self.config, "a search for prompts")
            self.algorithm.check(self.config, val)
        else:
            check_held_out(self.config, val)
        if isinstance(self.schedule, AlgorithmSchedule):
            sampler = sampler_of(Asked(self.config, self.schedule, self.train_agents, self.recorded))
        async with self._prepared(agent, train, val, sampler) as made:
            if isinstance(self.schedule, SearchAlgorithm):
                stack = await self._open_stack(
                    made.resources,
                    self.out,
                    made.start.model,
                    made.start.run,
                    made.start.store,
                    made.runner,
                    made.prompts,
                )
                trackers = await self._begin(made, stack)
                await self.schedule.search(stack, made.train, val, made.start.reporter, trackers, made.began)
                await mark_over(made.start.store, made.start.run.id, True)
                return await summarize(made.start.store, made.start.run.id)
            loop = await self._open_loop(made, val)
            await loop.run({"seconds/start": time.monotonic() - made.began})
            return await self._finished(made, loop)

    def session(self, agent: Agent | None, val: Sequence[Task | Json] = ()) -> AbstractAsyncContextManager[Session]:
        """Open everything that a run needs, for a training loop of your own: `async with trainer.session(agent) as session`.

        It leaves a run as `fit` does: the same record, checkpoints and model, and `resume` means the same. Checkpoints are
        written at each step. Raises `ConfigError` for settings that only `fit` has a meaning for, `PluginError` without the
        plugin that brings such loops, and what `fit` raises.
        """
        held_out = as_tasks(val, "val")
        refuse_ends(self.config, "a loop of your own")
        make = cast("MakeSession", plugins().sole("sessions", "Trainer.session"))
        return make(self, held_out, self._opened(agent, held_out))

    async def _dev(self, agent: Agent | None, tasks: list[Task]) -> DryRun:
        line = run_line(self.config)
        line.check(self.config)
        rehearse = step_line(self.config).rehearsal()
        runner = self._runner_of(agent)
        async with AsyncExitStack() as resources:
            folder = self.out / "dev"
            resources.enter_context(claim_folder(folder))
            reporter = resources.enter_context(Reporter(enabled=self.progress))
            store = await resources.enter_async_context(plugins().opened_store(sqlite_url(folder / DATABASE)))
            await self._fetch(reporter)
            numbers = [int(run.id.removeprefix("dev-")) for run in await store.list_runs(brief=True)]
            name = f"dev-{max(numbers, default=0) + 1}"
            run = await store.put_run(Run(name, name, self._described(tasks, []), project=self._project))
            prompts = await line.prompts(store, run, self.config.runner.prompts, home=self._url())
            if isinstance(self.schedule, AlgorithmSchedule):
                await check_model(self._make_engine(self.config), self.model, reporter, self.schedule)
            reporter.phase("starting the policy server")
            stack = await self._open_stack(resources, folder, self.model, run, store, runner, prompts)
            await stack.tell_how_to_call()
            say_how_to_join(stack, reporter)
            report = await rehearse(stack, tasks, self.train_agents, self.algorithm, reporter)
            command = shlex.join(["lightning", "runs", "show", run.id, "--runs", str(folder)])
            reporter.say(f"Next: see what was recorded: {command}")
            return report

    async def _summary(self) -> Summary:
        async with plugins().opened_store(self._url()) as store:
            return await summarize(store, self.run_id)

    # what a run needs, opened in order ----------------------------------------------------------------------------
    @property
    def run_id(self) -> str:
        """The run's id: the name its folder had when the run was started."""
        return run_id_of(self.out)

    def open_store(self) -> Store:
        """The run's store, not yet opened."""
        return plugins().store(self._url())

    def _url(self) -> str:
        return self._store_url or sqlite_url((self.out / "lightning.db").resolve())

    def _elsewhere(self) -> str:
        """The URL of a store outside the run's folder, as it is understood from any folder; empty when there is none."""
        if self._store_url is None:
            return ""
        where = parse(self._store_url)
        if where.scheme != "sqlite":
            return self._store_url
        return sqlite_url(Path(where.path).resolve(), sync=where.options.get("sync", ""))

    def _described(self, train: Sequence[Task], val: Sequence[Task]) -> dict[str, Json]:
        head = self.schedule.head if isinstance(self.schedule, AlgorithmSchedule) else ""
        return {
            "model": str(self.model),
            "algorithm": describe_algorithm(self.algorithm),
            "train_agents": list(self.train_agents),
            "engine": self.engine,
            "head": str(made_head(self.config, head) or ""),
            "seed": self.config.trainer.seed,
            "config": self.config.model_dump(mode="json"),
            "tasks": {"train": [task.id for task in train], "val": [task.id for task in val]},
        }

    @asynccontextmanager
    async def _prepared(
        self,
        agent: Agent | None,
        train: list[Task],
        val: list[Task],
        sampler: Sampler | None = None,
    ) -> AsyncIterator[Prepared]:
        """The run to begin or to go on with, and what it needs that costs little to open. `sampler` is where its groups come
        from, None for the core's own."""
        sampler = sampler or TurnSampler()
        line = run_line(self.config)
        line.check(self.config)
        needed = bool(val) or self.recorded is None
        self._runner_of(agent, needed=needed)  # refuses an agent that cannot be called, before a folder is made
        began = time.monotonic()
        async with AsyncExitStack() as resources:
            reporter = resources.enter_context(Reporter(enabled=self.progress))
            store, resume = await self._choose_folder(resources, reporter, agent, train, val, sampler)
            runner = self._runner_of(agent, needed=needed)
            record = await self._open_record(resources, store, sampler, reporter)
            await self._fetch(reporter)
            train = [*record.tasks] if record else train
            described = self._described(train, val) | ({RECORDED: record.described} if record else {})
            requests = runner.concurrency or self.config.runner.concurrency
            start = await self._start(store, described, reporter, requests, resume=resume)
            if not isinstance(self.schedule, SearchAlgorithm):
                say_needs(await line.needs(start), reporter)
            teacher = await line.teacher(start)
            start, epochs, bring_forward = await prepare(start, line, self.from_run, teacher)
            prompts = await line.prompts(store, start.run, self.config.runner.prompts)
            reporter.phase("starting the policy server and loading the model")
            yield Prepared(
                resources,
                start,
                epochs,
                bring_forward,
                line,
                prompts,
                name_of(agent),
                runner,
                train,
                sampler,
                teacher,
                began,
            )

    async def _choose_folder(
        self,
        resources: AsyncExitStack,
        reporter: Reporter,
        agent: Agent | None,
        train: list[Task],
        val: list[Task],
        sampler: Sampler,
    ) -> tuple[Store, bool]:
        """Choose the run's folder (`out`, or one beside it) and say why; return its store, open, and whether the run there goes
        on. `resources` closes it and holds the folder. Nothing is written over. Raises `ConfigError` if the run to resume is
        held by another process or kept by another store."""
        first = ""
        for folder in folders_beside(self._asked_out):
            self.out = folder
            async with AsyncExitStack() as held:
                try:
                    held.enter_context(claim_folder(self.out))
                except FolderHeldError:
                    if self.resume:
                        raise
                    first = first or "is in use by another process"
                    continue
                elsewhere = kept_elsewhere(self.out, self._elsewhere())
                if elsewhere and self._store_url is None:  # to open the folder's own database would create it
                    first = first or self._kept_by(elsewhere)
                    continue
                store = await held.enter_async_context(plugins().opened_store(self._url()))
                known = await store.get_run(self.run_id)
                if elsewhere and known is None:
                    first = first or self._kept_by(elsewhere)
                    continue
                if known is not None and not self.resume:
                    if other := await self._why_beside(store, known, agent, train, val, sampler):
                        first = first or other
                        continue
                    self._tell(
                        reporter,
                        f"{self.out} holds an unfinished run with these settings: going on with it after step "
                        f"{await steps_taken(store, known)}. resume=False (--no-resume) begins a new run beside it",
                    )
                elif first:
                    self._tell(
                        reporter,
                        f"{self._asked_out} {first}: this is a new run, in {self.out}. resume=True (--resume) goes on with "
                        f"the run in {self._asked_out}, under the present settings",
                    )
                resources.push_async_exit(held.pop_all())
                return store, bool(self.resume) or known is not None
        raise AssertionError("there is always another folder")

    def _kept_by(self, elsewhere: str) -> str:
        """Why the run of this folder, which another store keeps, is left as it is, in words that follow the folder's name.
        Raises `ConfigError` if it is to be resumed."""
        why = f"holds a run that another store keeps, {redacted(elsewhere)}"
        if self.resume:
            raise ConfigError(
                f"{self.out} {why}: give this store to go on with it (store=URL, --store), or another `out`"
            )
        return why

    async def _why_beside(
        self, store: Store, known: Run, agent: Agent | None, train: list[Task], val: list[Task], sampler: Sampler
    ) -> str:
        """Why the run of this folder is left as it is, in words that follow the folder's name; empty if it goes on."""
        if self.resume is False:
            return f"holds a run ({counted(await steps_taken(store, known), 'step')}), and resume is False"
        if self._store_url and not (self.out / RUN_FILE).is_file():
            return "has the name of a run that its store keeps for another folder"
        if await is_over(store, known.id):
            return f"holds a finished run ({counted(await steps_taken(store, known), 'step')})"
        theirs = await agent_of(store, known)
        if theirs and name_of(agent) not in ("", theirs):
            return f"holds a run of another agent ({theirs})"
        if not began_with(known, self.from_run or "", self.out):
            return f"holds a run that began with the weights of {known.config.get(FORKED) or 'its own model'}"
        async with AsyncExitStack() as opened:
            try:
                record = await self._open_record(opened, store, sampler, Reporter(enabled=False))
            except ConfigError as error:
                return f"holds another run ({error})"
            await self._fetch(Reporter(enabled=False))
            described = self._described([*record.tasks] if record else train, val)
            described |= {RECORDED: record.described} if record else {}
        schedule = self.schedule
        phases = schedule.phases if isinstance(schedule, AlgorithmSchedule) else ()
        return await why_not_go_on(
            store, known, described, [(first, describe_algorithm(algorithm)) for first, algorithm in phases]
        )

    def _tell(self, reporter: Reporter, text: str) -> None:
        """Say where a run goes, also where no progress is shown."""
        if self.progress:
            reporter.say(text)
        else:
            logger.warning("%s", text)

    async def _fetch(self, reporter: Reporter) -> None:
        """Fetch the model from the hub if it is not here, and take the rate that fits its size."""
        if self._to_fetch:
            reporter.phase(f"fetching the model {self._to_fetch}")
            self.model, self._to_fetch = await asyncio.to_thread(resolve_model, self._to_fetch), ""
            self._take_rate()

    def _take_rate(self) -> None:
        """Take the default rate for the model if none is set and the algorithm trains weights."""
        if isinstance(self.schedule, AlgorithmSchedule) and self.config.engine.lr is None:
            rate, self._rate_chosen = default_rate(self.config, self.model)
            self.config = with_settings(self.config, {"engine.lr": rate})

    async def _start(
        self, store: Store, described: Mapping[str, Json], reporter: Reporter, requests: int, *, resume: bool
    ) -> Start:
        """The run to begin or to go on with, and what is known of it. Raises `ConfigError` for one that cannot be, or that has
        no room on the disk."""
        searches = isinstance(self.schedule, SearchAlgorithm)
        run = await check_run(store, self.run_id, described, resume=resume, project=self._project, searches=searches)
        disk = None if searches else await asyncio.to_thread(disk_need, self.out, self.model, self.config)
        if disk is not None:
            check_disk(disk, self.out)
            reporter.say(f"this run {disk.said}")
        if self._rate_chosen:
            reporter.say(f"engine.lr is {self.config.engine.lr:g}, {self._rate_chosen}; --lr sets another")
        return Start(
            store,
            run,
            described,
            self.out,
            self.model,
            self.schedule.phases if isinstance(self.schedule, AlgorithmSchedule) else (),
            with_dtypes(self.config, self.model, self.engine),
            self._make_engine,
            self._store_url or "",
            reporter,
            requests,
        )

    async def _open_loop(self, made: Prepared, val: list[Task]) -> Loop:
        """What samples and what trains, opened, and the loop over them."""
        assert isinstance(self.schedule, AlgorithmSchedule), "a search has a loop of its own"
        engine = self._make_engine(made.start.config)
        made.resources.callback(engine.close)
        await check_model(engine, self.model, made.start.reporter, self.schedule)
        stack, base = await self._open_both(
            made, engine, head=made_head(self.config, made.epochs[-1].config.get("head"))
        )
        trackers = await self._begin(made, stack)
        await stack.tell_how_to_call()
        return Loop(
            stack,
            engine,
            self.schedule,
            made.train,
            val,
            self.train_agents,
            made.start.reporter,
            trackers,
            made.epochs,
            base,
            made.sampler,
            made.teacher,
            step_line(made.start.config),
            made.line,
            made.bring_forward,
        )

    @asynccontextmanager
    async def _opened(self, agent: Agent | None, val: list[Task]) -> AsyncIterator[Loop]:
        """The loop of a run whose steps the block takes; after the block the run is over."""
        async with self._prepared(agent, [], val) as made:
            loop = await self._open_loop(made, val)
            yield loop
            await self._finished(made, loop)

    async def _finished(self, made: Prepared, loop: Loop) -> Summary:
        """The run is over: say so, and tell plugins where its model lies."""
        await mark_over(made.start.store, made.start.run.id, True)
        summary = await summarize(made.start.store, made.start.run.id)
        kept = loop.kept
        steps, reward = (kept.step, kept.reward) if kept else (summary.steps, summary.final_reward)
        about: dict[str, Json] = {"run": made.start.run.id, "steps": steps, "reward": reward}
        probes = [] if kept else await asyncio.to_thread(loop.publisher.prober.probes)
        dtype = made.start.config.engine.dtype
        about[PROBES] = {
            probe.policy: {"ids": [*probe.ids], "logprobs": [0.0, *probe.logprobs[1:]], "dtype": dtype}
            for probe in probes
        }
        await made.line.exported(made.start.store, made.start.run, self.out / "model", about)
        return summary

    async def _open_record(
        self, resources: AsyncExitStack, store: Store, sampler: Sampler, reporter: Reporter
    ) -> Brought | None:
        """What the run is trained on, where that is a record; steps that were not set are one pass over it. Raises
        `ConfigError` where a run goes on otherwise than it began."""
        run = await store.get_run(self.run_id)
        known = None if run is None else run.config.get(RECORDED)
        if self.recorded is None:
            if known is not None:
                raise ConfigError(f"run {self.run_id!r} is trained on a record: give it again (recorded, --recorded)")
            return None
        if run is not None and known is None:
            raise ConfigError(f"run {self.run_id!r} is not trained on a record: give another `out`")
        record = await sampler.opened(resources, known, self.out, self._project)
        if not self._steps_set:
            self.config = with_settings(self.config, {"trainer.steps": record.steps})
        reporter.say(record.said)
        return record

    async def _open_both(self, made: Prepared, engine: Engine, *, head: Head | None) -> tuple[Stack, str]:
        """What samples and what trains, opened; and the digest of the model's folder."""
        run, store = made.start.run, made.start.store
        # A server of our own has the weights of a run without steps; everything else is given its weights by the loop.
        restores = bool(
            self.config.policy_server.attach
            or await store.last_step(run.id)
            or Checkpoints(self.out / "checkpoints", keep=1).newest(0) == 0
        )
        sender = engine.sender() if isinstance(engine, SendsWeights) else None
        # On one GPU vLLM measures what is free while it starts: nothing may be loaded there meanwhile.
        open_in_order = one_by_one if shares_gpu(self.config) else together
        return await open_in_order(
            self._open_stack(
                made.resources,
                self.out,
                made.start.model,
                run,
                store,
                made.runner,
                made.prompts,
                restores=restores,
                sender=sender,
                store_url=self._url(),
            ),
            asyncio.to_thread(self._open_engine, engine, made, head=head),
        )

    async def _open_stack(
        self,
        resources: AsyncExitStack,
        folder: Path,
        model: Path,
        run: Run,
        store: Store,
        runner: Runner,
        prompts: Prompts,
        *,
        restores: bool = False,
        sender: object | None = None,
        store_url: str = "",
    ) -> Stack:
        return await open_stack(
            resources,
            run=run,
            config=with_dtypes(self.config, self.model, self.engine),
            folder=folder,
            model=model,
            store=store,
            runner=runner,
            prompts=prompts,
            restores=restores,
            sender=sender,
            store_url=store_url,
        )

    def _runner_of(self, agent: Agent | None, *, needed: bool = True) -> Runner:
        """The runner. Raises `ConfigError` when it runs agents in this process and there is none, where one is `needed`."""

        def nobody(task: object, llm: object) -> float:
            raise DataError("there is no agent in this process")

        runner = self._make_runner(agent or nobody, hidden_from_agents(self.config, self.out, self._url()))
        if agent is None and runner.concurrency and needed:
            raise ConfigError("there is no agent: give one, or runner='remote' and start `lightning runner` elsewhere")
        return runner

    def _open_engine(self, engine: Engine, made: Prepared, *, head: Head | None) -> str:
        """Open it, and return the digest of the model's folder, which is read while the policy server starts."""
        other = reference_of(engine, made.teacher)
        optimizer = optimizer_of(self.config)
        engine.open(made.start.model, optimizer, seed=self.config.trainer.seed, head=head, **other)
        return base_digest(made.start.model, self.out / "base.json")

    async def _begin(self, made: Prepared, stack: Stack) -> Trackers:
        """Make it a run. Not before everything stands: a failed start leaves none that a corrected one would stumble over.

        Servers are not told yet how its agents call: a search for prompts knows its component later, and clients may lease
        what waits of a resumed run already, by what they were told before.
        """
        name_folder(self.out, stack.run.id, self._elsewhere())
        await stack.store.put_run(stack.run)
        await keep_epochs(stack.store, stack.run, made.epochs)
        await stack.store.put_state(stack.run.id, AGENT, made.agent)
        await mark_over(stack.store, stack.run.id, False)
        await stack.prompts.keep(stack.store, stack.run.id)
        say_how_to_join(stack, made.start.reporter)
        described = self._described((), ())
        trackers = Trackers(
            names_of(self.config),
            self.config,
            run=stack.run.id,
            folder=self.out,
            store=stack.store,
            about={name: described[name] for name in ("model", "algorithm", "train_agents")},
        )
        return made.resources.enter_context(trackers)


def _settings_of(given: object) -> Config:
    """The configuration that was given, in one of its forms. Raises `ConfigError` for unknown settings and other objects."""
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return with_settings(load_config(), given)
    if given is not None and not isinstance(given, (str, Path)):
        raise ConfigError(
            f"config is {given!r:.80}: give settings by name, such as config={{'trainer.steps': 8}}, a TOML file, or a "
            "lightning.config.Config"
        )
    return load_config(Path(given) if given else None)


def _check_settings(config: Config, store: str | None) -> None:
    """Refuse what cannot go together, or needs a plugin that is not there, before anything is started."""
    if config.gateway.token_ttl < config.runner.timeout:
        raise ConfigError(
            f"gateway.token_ttl ({config.gateway.token_ttl:g} s) is shorter than runner.timeout "
            f"({config.runner.timeout:g} s): an agent's key would expire under it. Raise gateway.token_ttl"
        )
    if store is not None and store.partition("://")[0] in ("http", "https"):
        raise ConfigError(
            f"{redacted(store)} is a server: a trainer needs the database itself, as postgresql://, redis:// or sqlite:///"
        )
    if (several := plugins().policy_set(config)) is not None:
        several.check()
    check_server_settings(config)
    check_gateway(config.gateway)
    check_policy_server(config.policy_server)
    for tracker in names_of(config):
        plugins().get("trackers", tracker)
    step_line(config)


def refuse_ends(config: Config, what: str) -> None:
    """Raise `ConfigError` for settings of a stage that ends runs between steps, where nobody asks it."""
    if ending := [each.said for each in step_line(config).at("ends")]:
        raise ConfigError(
            f"the stage {ending[0]} ends the training of Trainer.fit between its steps, and nothing asks it in {what}: leave "
            "its settings out"
        )


def say_needs(needs: Sequence[Need], reporter: Reporter) -> None:
    """Say what a run needs, and warn of what is certainly too small."""
    for need in needs:
        reporter.say(f"this run {need.said}")
        if not need.is_met:
            logger.warning("this run %s, which is too little. %s", need.said, need.cure)


async def check_model(engine: Engine, model: Path, reporter: Reporter, schedule: AlgorithmSchedule) -> None:
    """Refuse a model folder that cannot be trained, or not with the losses of the schedule, or say what of it may not be
    expected, while nothing is started."""
    if isinstance(engine, ChecksModel) and (remark := await asyncio.to_thread(engine.check, model)):
        reporter.say(f"{model}: {remark}")
    from lightning.engines.step import check_loss  # torch, which takes long to load

    for _, algorithm in schedule.phases:
        await asyncio.to_thread(check_loss, engine, model, algorithm.loss)


def say_how_to_join(stack: Stack, reporter: Reporter) -> None:
    """Tell how agents join a run that starts none itself."""
    if stack.agents.how_to_join:
        reporter.say(f"agents run in clients; start one where they are to run: {stack.agents.how_to_join}")


async def prepare(
    start: Start, line: RunLine, parent: str | None, teacher: Teacher | None = None
) -> tuple[Start, list[Epoch], BringForward | None]:
    """What the run begins with: its start, with the model; its epochs; and what takes its recorded steps again, if anything
    does. `parent` is the run to fork, if any.

    Raises `ConfigError` for a parent that a run cannot have, and what `RunLine.bring_forward` does.
    """
    run, model, described, store = start.run, start.model, dict(start.described), start.store
    records = await store.steps(run.id)
    if (begun := await line.begun(start, parent)) is not None:
        run, model = replace(run, config={**run.config, **begun.described}), begun.model
        described |= begun.described
    else:
        Checkpoints(start.folder / "checkpoints", keep=1).discard(0)  # of a fork that did not begin
    described["head"] = described["head"] or run.config.get("head", "")
    algorithms = [(first, describe_algorithm(algorithm)) for first, algorithm in start.phases]
    epochs = await plan_epochs(store, run, described, algorithms)
    for epoch in epochs[1:]:
        if records and epoch.first == len(records) + 1:
            changed = "\n  ".join(changes_of(epochs, epoch.number))
            start.reporter.say(f"config epoch {epoch.number} begins with step {epoch.first}:\n  {changed}")
            warn_of_tasks(epochs[epoch.number - 1], epoch)
    start = replace(start, run=run, model=model)
    return start, epochs, await line.bring_forward(start, records, epochs, teacher)


def warn_of_tasks(before: Epoch, after: Epoch) -> None:
    """Say that a run goes on with other training tasks."""
    old, new = task_ids(before), task_ids(after)
    given = after.setting("trainer", "order") == "given"
    if not old or old == new or (not given and set(old) == set(new)):
        return
    moved = "" if set(old) != set(new) else ", and they stand in another order"
    rule = (
        "trainer.order = given goes on at its place in the list, so tasks that moved may come twice in a pass or not at all"
        if given
        else "what a pass has taken comes no second time in it, and new ones join it where their turn is still to come"
    )
    logger.warning(
        "the training tasks changed: %d added, %d removed%s; %s",
        len(set(new) - set(old)),
        len(set(old) - set(new)),
        moved,
        rule,
    )

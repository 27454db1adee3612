"""`Trainer`: from an agent and its tasks to a better model, in one call.

The invariant: one folder (`out`) holds everything a run is: database, checkpoints, logs, metrics, final model. The same call
with `resume=True` goes on where it stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path

from lightning.algorithms.protocol import Algorithm, SearchAlgorithm
from lightning.asyncio_utils import run_to_end
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError, DataError
from lightning.plugins import plugins
from lightning.policy_server.vllm_server import check_policy_server
from lightning.runner.protocol import Agent
from lightning.store.places import DATABASE
from lightning.store.url import redacted, sqlite_url
from lightning.tracking.trackers import names_of
from lightning.trainer.agents import check_server_settings, project_of
from lightning.trainer.algorithm import AlgorithmSchedule, resolve_schedule
from lightning.trainer.context import mark_over
from lightning.trainer.model import default_rate, resolve_model
from lightning.trainer.opening import RunOpening, check_model, say_how_to_join
from lightning.trainer.plan import as_tasks, fixed_order
from lightning.trainer.run_stages import run_line
from lightning.trainer.runs import claim_folder
from lightning.trainer.samplers import Asked, sampler_of
from lightning.trainer.session import Session
from lightning.trainer.stack import check_gateway
from lightning.trainer.stages import DryRun, step_line
from lightning.trainer.summary import Reporter, Summary, check_held_out, summarize
from lightning.types import Json, Run, Task, as_texts

logger = logging.getLogger(__name__)


class Trainer(RunOpening):
    """Makes the model behind an agent better by reinforcement learning.

    `model` is a folder with a `transformers` causal LM, or the name of one on a model hub. `algorithm` is an object or the
    name of a registered one, alone or with arguments (`"grpo:group_size=4"`), or several in turn with the steps of each
    (`"sft:2,grpo:20"`; `trainer.steps` is then their sum unless it is set). `adapters` names the adapters to install in the
    agents' processes (default: all found), `train_agents` the agents whose calls are trained on, as globs on the caller path
    (default: all). It freezes none: all are answered by the same weights (docs/gateway.md says how to freeze one).
    `model:GLOB` is matched with the model that a call asked for, and a glob after `!` takes out what it matches.
    `engine`, `runner` and the scheme of `store` are names of plugins. `config` is a `lightning.config.Config` or a TOML file;
    the keyword arguments after it are shortcuts for its commonest fields and win over it. `out` is the run's folder; its name
    at the first start is the run's id. `from_run` is a run whose weights and optimizer a new one begins with: `"RUN@STEP"`, by
    its folder or its name beside `out`, or `"RUN"` for its last step. `recorded` is a run's folder, a database or its URL (with
    `#RUN`: of that run alone) whose scored rollouts are trained on in place of new ones; the agent then runs for `val` alone,
    and `trainer.steps` is one pass over the record unless it is set.

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
        policy_server: str | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        from_run: str | None = None,
        recorded: str | None = None,
        config: Config | str | Path | None = None,
        steps: int | None = None,
        tasks_per_step: int | None = None,
        lr: float | None = None,
        seed: int | None = None,
        concurrency: int | None = None,
        progress: bool = True,
    ) -> None:
        self.train_agents = as_texts(train_agents, "train_agents")
        base = config if isinstance(config, Config) else load_config(Path(config) if config else None)
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
        self._project = project_of(self.config)
        _check_settings(self.config, store)
        if resume and out is None:
            raise ConfigError("resume needs the run to go on with: give its folder as `out` (--out runs/NAME)")
        self.model = resolve_model(model)
        self.algorithm = schedule.at(1) if isinstance(schedule, AlgorithmSchedule) else schedule
        self._rate_chosen = ""
        if isinstance(schedule, AlgorithmSchedule) and self.config.engine.lr is None:
            rate, self._rate_chosen = default_rate(self.config, self.model)
            self.config = with_settings(self.config, {"engine.lr": rate})
        self.from_run, self.recorded = from_run, recorded
        if recorded is not None and isinstance(schedule, SearchAlgorithm):
            raise ConfigError("a search for prompts runs its agents: it cannot learn from what was recorded")
        self._steps_set = "steps" in base.trainer.model_fields_set or "trainer.steps" in given
        self.engine = engine
        self._make_engine, self._make_runner = plugins().engine(engine), plugins().runner(runner)
        self._store_url = store
        self.out = Path("runs") / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}" if out is None else Path(out)
        self.resume, self.progress = resume, progress

    def fit(self, agent: Agent | None, train: Sequence[Task | Json], val: Sequence[Task | Json] = ()) -> Summary:
        """Train until `trainer.steps`, evaluating on `val`; returns what was achieved.

        `agent(task, llm)` is called in worker processes with a `Task` and an `LLM`; it returns its reward. With
        `runner="remote"` clients call theirs, and `agent` may be None. Interrupting
        (Ctrl-C, SIGTERM) stops cleanly; call again with `resume=True` to go on. Raises `DataError` for an empty task list,
        `ConfigError` when the folder holds another run, and what the rooms raise (`PolicyServerError`, `EngineError`, ...).
        """
        return run_to_end(self._fit(agent, as_tasks(train, "train"), as_tasks(val, "val")))

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
                say_how_to_join(stack, made.start.reporter)
                await self.schedule.search(stack, made.train, val, made.start.reporter, trackers, made.began)
                await mark_over(made.start.store, made.start.run.id, True)
                return await summarize(made.start.store, made.start.run.id)
            loop = await self._open_loop(made, val)
            kept = await loop.run({"seconds/start": time.monotonic() - made.began})
            return await self._finished(made, loop, kept)

    @asynccontextmanager
    async def session(self, agent: Agent | None, val: Sequence[Task | Json] = ()) -> AsyncIterator[Session]:
        """Everything that a run needs, open, for a training loop of your own (`lightning.trainer.session`).

        It leaves a run as `fit` does: the same record, checkpoints and model, which `resume=True` goes on with. Checkpoints are
        written at each step. Raises `ConfigError` for settings that only `fit` has a meaning for, and what `fit` raises.
        """
        held_out = as_tasks(val, "val")
        self._check_own_loop(held_out)
        async with self._prepared(agent, [], held_out, own_loop=True) as made:
            loop = await self._open_loop(made, held_out, own_loop=True)
            async with Session(loop) as session:
                yield session
            await self._finished(made, loop, session.kept)

    def _check_own_loop(self, held_out: list[Task]) -> None:
        """Refuse, before anything is opened, what a loop of somebody's own cannot do; name what it does not look at."""
        if self.recorded is not None or not isinstance(self.schedule, AlgorithmSchedule):
            raise ConfigError("a loop of your own samples rollouts and updates weights: give no record, and no search")
        if head := self.schedule.head:
            raise ConfigError(
                f"the head {head!r} is trained by Trainer.fit alone: choose a credit without one for your own loop"
            )
        trainer, engine, plain = self.config.trainer, self.config.engine, Config()
        if fixed_order(trainer.order) is None or engine.minibatches * engine.epochs > 1:
            raise ConfigError(
                "orders of plugins (trainer.order), engine.minibatches and engine.epochs belong to Trainer.fit: your own loop "
                "chooses its tasks, and takes as many updates as it calls optim_step()"
            )
        if trainer.sampling != plain.trainer.sampling:
            raise ConfigError(
                f"trainer.sampling = {trainer.sampling} belongs to Trainer.fit: your own loop says what is sampled, and where "
                "branches begin with session.branch()"
            )
        if trainer.max_reuse and not trainer.max_staleness:
            raise ConfigError(
                f"trainer.max_reuse = {trainer.max_reuse} with trainer.max_staleness = 0: after a step its rollouts are too "
                "old for another one. Set trainer.max_staleness to the age in steps at which a replay buffer drops them"
            )
        check_held_out(self.config, held_out)
        unused = ("tasks_per_step", "eval_every", "patience", "max_waves", "checkpoint_every")
        if said := [name for name in unused if getattr(trainer, name) != getattr(plain.trainer, name)]:
            logger.warning("a loop of your own does not look at trainer.%s: leave it out", ", trainer.".join(said))

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
            numbers = [int(run.id.removeprefix("dev-")) for run in await store.list_runs(brief=True)]
            name = f"dev-{max(numbers, default=0) + 1}"
            run = await store.put_run(Run(name, name, self._described(tasks, []), project=self._project))
            prompts = await line.prompts(store, run, self.config.runner.prompts, home=self._url())
            if not isinstance(self.algorithm, SearchAlgorithm):
                await check_model(self._make_engine(self.config), self.model, reporter)
            reporter.phase("starting the policy server")
            stack = await self._open_stack(resources, folder, self.model, run, store, runner, prompts)
            await stack.tell_how_to_call()
            say_how_to_join(stack, reporter)
            report = await rehearse(stack, tasks, self.train_agents, self.algorithm, reporter)
            said = f"what was recorded: `lightning runs show {run.id} --runs {folder}`"
            reporter.console.print(said, markup=False, highlight=False, soft_wrap=True)
            return report

    async def _summary(self) -> Summary:
        store = self.open_store()
        await store.open()
        try:
            return await summarize(store, self.run_id)
        finally:
            await store.close()


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
    check_server_settings(config)
    check_gateway(config.gateway)
    check_policy_server(config.policy_server)
    for tracker in names_of(config):
        plugins().get("trackers", tracker)
    step_line(config)

"""The verl engine: our rows and losses on verl's workers, on any number of GPUs.

The invariant: the loss and its gradient are those of the rows alone. Whole rows are dealt to the data-parallel places, each row
to one place. All places get equally many rows, as collectives need; a row that only fills a place up has no weights and no
spans, so it is in no sum. Every rank's loss is a sum, so that the sum over ranks is that of the step.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from lightning.batch import FloatArray, Sample
from lightning.engines import rows
from lightning.engines.export import UNTRAINABLE, contents
from lightning.engines.files import recover, whole_folder
from lightning.engines.loading import check_config, read_model, served_length
from lightning.engines.protocol import Head, OptimizerConfig, StepResult
from lightning.engines.rows import Numbers, Tally, Tokens, trained_tokens
from lightning.engines.step import (
    MORE_ROOM,
    SMALLER_ROWS,
    NonFiniteError,
    StepDriver,
    is_prepared,
    no_head,
    prepared,
    refuse_targets,
)
from lightning.errors import ConfigError, DataError, EngineError, WorkersLostError
from lightning.losses.protocol import Loss
from lightning.plugins import DISABLE
from lightning.types import Json

from lightning_verl.config import VerlConfig
from lightning_verl.device import choose
from lightning_verl.megatron_settings import SHARING, layout, refuse_beside, shared_rows
from lightning_verl.sender import FirstWorker
from lightning_verl.state import Taken, check_seen, read_state, write_state

if TYPE_CHECKING:
    from lightning.config import Config

    from lightning_verl.passes import Report
    from lightning_verl.worker_group import Group

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Opened:
    """The arguments of `open`, with which lost workers can be started again."""

    model: Path
    optimizer: OptimizerConfig
    seed: int
    vocab_size: int
    head: Head | None
    reference: Path | None
    """The teacher's folder; None without a teacher."""


class VerlEngine:
    """Trains on verl's workers. Implements `Engine` and `WritesAdapters` of `lightning.engines.protocol`. Its settings are
    `Config.engine` and `Config.engine.verl`."""

    revives_workers: Literal[True] = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._device = ""
        self._opened: _Opened | None = None
        self._group: Group | None = None
        self._own_cluster = False
        self._ranks: list[tuple[int, bool]] = []
        self._taken = Taken()
        self._saved: tuple[Path, Taken] | None = None
        self._restarts, self._died_at = 0, 0
        self._turn = threading.Lock()
        """Held during a call and during a transfer, because weights may have to be sent to a restarted vLLM while a step is
        computed."""
        self._sends = threading.Lock()
        """Held during one call of a transfer, because the call that leaves the group is made while another is under way."""
        self._budget = config.engine.tokens_per_microbatch
        self._driver = StepDriver(config.engine.max_nonfinite_steps)
        self._moved = (0, 0)
        """How many updates of the present step changed the policy and the head."""
        self._summed: Sequence[Sample] = ()
        """The rows of the present gradient."""
        self._longest = 0
        """Tokens of a rank's part of the longest row in the present call; micro-batches are never smaller. 0 outside a call."""
        self._sharing = shared_rows(config)

    def check(self, model: Path) -> str:
        """Check that the model folder can be trained, and return remarks on it. Raises `ConfigError` for FP8 weights."""
        found = contents(model, lora=self._config.engine.lora, max_model_len=served_length(self._config.policy_server))
        if found.fp8:
            raise ConfigError(f"the weights in {model} are FP8, which verl does not train: {UNTRAINABLE}")
        return found.remark()

    def check_teacher(self, teacher: Path) -> None:
        """Check that the teacher can be the reference model. Raises `ConfigError` or `EngineError` otherwise."""
        refuse_beside(self._config, head=None, teacher=True)
        read_model(teacher, device_map="meta")

    def open(
        self,
        model: Path,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        head: Head | None = None,
        reference: Path | None = None,
    ) -> None:
        """Start the workers and load a model folder, which every machine of the cluster must see."""
        if self._config.engine.step == "tree":
            logger.info("rows are computed one by one, not as a tree: verl's models take packed rows")
        self.close()
        refuse_beside(self._config, head=head, teacher=reference is not None)
        self._device = choose(self._config.engine.device)
        self._opened = _Opened(model, optimizer, seed, _vocab_size(model), head, reference)
        self._taken, self._saved = Taken(), None
        self._driver.begin(optimizer, seed)
        self._start()

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the current policy's logprobs, shape (T,) for each row; index 0 is NaN."""
        self._checked(samples)
        return self._again(lambda: self._read("logprobs", samples, reference=False))

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the head's values of the state before each span, shape (spans,) for each row."""
        self._checked(samples)
        if self._ready().head is None:
            raise no_head()
        valued = [rows.cut(sample, max(span.start for span in sample.spans)) for sample in samples if sample.spans]
        found = iter(self._again(lambda: self._read("values", valued)))
        return [next(found) if sample.spans else np.zeros(0, np.float32) for sample in samples]

    def step(self, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        """Take a step on the sum of the rows' losses, as `StepDriver` does.

        Raises `DataError` for rows that cannot be computed on, and `EngineError` when too many updates in a row are not finite
        (`engine.max_nonfinite_steps`). Workers that die are started again from the last checkpoint, if it is that of the last
        step, and the whole step is repeated.
        """
        trained = self._trainable(samples)
        return self._again(lambda: self._step(trained, loss, lr))

    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Add the gradient of these rows to the present one. Workers that die lose the gradient, so that is an error here."""
        trained = self._trainable(samples)
        with self._turn:
            try:
                return self._driver.forward_backward(self, trained, loss)
            except BaseException:
                self._drop()
                raise

    def optim_step(self, lr: float | None = None) -> StepResult:
        """Clip the gradient, update at the rate `lr` (None: the optimizer's), and drop the gradient."""
        self._ready()
        with self._turn:
            self._moved = (0, 0)
            result = self._driver.optim_step(self, lr)
            self._note(result)
            return result

    def prepare(self, samples: Sequence[Sample], loss: Loss) -> Sequence[Sample]:
        """Return the rows with the logprobs that the loss needs of their tokens; other losses get the rows unchanged."""
        if not is_prepared(loss):
            return samples
        tokens = trained_tokens(samples)
        current, reference = (partial(self._logprobs, samples, tokens, reference=which) for which in (False, True))
        return prepared(loss, samples, tokens, lambda: (current(), None), reference)

    def accumulate(self, samples: Sequence[Sample], loss: Loss, step: int) -> Tally:
        """Add the gradient of these rows. Raises `EngineError` for an error of the loss, `NonFiniteError` where a loss is not
        finite; the gradient is then dropped."""
        added = bool(self._summed)
        reports: list[Report] = [report for _, report in self._dealt("accumulate", samples, loss, step, added)]
        problems = [report.problem for report in reports if report.problem]
        nonfinite = [report.nonfinite for report in reports if report.nonfinite]
        if problems or nonfinite:
            self._summed = ()
            self._run("discard")
            if problems:
                raise EngineError(f"{problems[0]}, so this update was not taken")
            raise NonFiniteError(nonfinite[0])
        self._summed = [*self._summed, *samples]
        tally = Tally()
        for report in reports:
            tally.merge(report.tally)
        return tally

    def update(self, lr: float, step: int) -> dict[str, float]:
        """Clip the gradient, update, and return the norms. A policy or head without a gradient is not changed. Raises
        `NonFiniteError` for a norm that is not finite."""
        policy, head = self._moves(self._summed)
        self._summed = ()
        norms: dict[str, float] = self._run("update", lr if policy else None, lr if head else None)[0]
        if not all(map(math.isfinite, norms.values())):
            raise NonFiniteError(f"the gradient is not finite at step {step}")
        self._moved = (self._moved[0] + policy, self._moved[1] + head)
        return norms

    def save(self, folder: Path) -> None:
        """Write the whole training state to a folder, atomically. An existing folder is replaced."""
        opened, taken = self._ready(), self._taken
        with self._turn, whole_folder(folder) as path:
            for host, files in self._run("save", path.resolve(), taken.policy):
                check_seen(host, [path / file for file in files], folder)
            write_state(path, taken, opened.optimizer, opened.head, layout(self._config))
        self._saved = folder.resolve(), taken

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, with any number of workers (Megatron: with as many, and the same parallel sizes). The
        optimizer's settings stay those of `open`."""
        opened = self._ready()
        recover(folder)
        taken = read_state(folder, opened.head, layout(self._config))
        self._again(lambda: self._run("load", folder.resolve(), taken.policy, taken.head))
        self._taken, self._saved, self._driver.steps = taken, (folder.resolve(), taken), taken.steps
        self._drop()

    def export(self, folder: Path) -> Path:
        """Write a model folder that `transformers` and vLLM load, LoRA merged, and return it."""
        return self._written(folder, folder / "config.json", model=True)

    def weights(self, file: Path) -> Path:
        """Write the current full weights as one safetensors file, LoRA merged, and return it."""
        return self._written(file, file, model=False)

    def adapters(self, file: Path) -> Path | None:
        """Write the adapters alone and return the file; None if all weights are trained, or if the model folder stores an
        adapted layer in another form."""
        opened = self._ready()
        if self._config.engine.lora is None:
            return None
        arguments = opened.model.resolve(), file.resolve(), self._dtype()
        if not all(self._again(lambda: self._run("write_adapters", *arguments))):
            return None
        check_seen("the first worker's machine", [file], file)
        return file

    def _written(self, target: Path, seen: Path, *, model: bool) -> Path:
        source = self._ready().model.resolve()
        self._again(lambda: self._run("write", source, target.resolve(), self._dtype(), model=model))
        check_seen("the first worker's machine", [seen], target)
        return target

    def numerics(self) -> dict[str, Json]:
        """The numeric settings of the computation (`trainer.context.Numeric`)."""
        self._ready()
        return {
            "dtype": self._dtype(),
            "device": f"{max(1, VerlConfig.of(self._config).world_size)} x {self._device}",
            "threads": self._config.engine.threads,
            "tokens_per_microbatch": self._budget,
        }

    def sender(self) -> FirstWorker:
        """The sender of weights: the first worker, which writes the file of `weights`."""
        return FirstWorker(self._sending, self._turn, self._config.engine)

    def close(self) -> None:
        """End the workers, and the cluster if it was started here. Idempotent."""
        self._opened = None  # first, or a call in another thread would start the ended workers again
        group, self._group = self._group, None
        self._end(group)

    def _end(self, group: Group | None) -> None:
        if group is not None:
            group.close()
        own, self._own_cluster = self._own_cluster, False
        if own:
            import ray

            ray.shutdown()

    def _ready(self) -> _Opened:
        if self._opened is None:
            raise EngineError("the engine has no model: call open() first")
        return self._opened

    def _sending(self, method: str, *arguments: object) -> tuple[Any, str]:
        """Call a method of the first worker's sender, and return its answer and its error. The caller must have the lock
        `_turn`."""
        with self._sends:
            answer: tuple[Any, str] = self._until_done(lambda: self._run("sending", method, arguments))[0]
        return answer

    def _checked(self, samples: Sequence[Sample]) -> None:
        opened = self._ready()
        for sample in samples:
            rows.check(sample, opened.vocab_size)
            if sample.mask is not None:
                raise DataError(
                    f"the training row of {rows.name(sample)} has sampling masks (top_p, a grammar, ...), which the engine "
                    "'verl' does not train with: take the engine 'torch', or train such calls with the ratio 1, by "
                    f"{DISABLE}=masks in the environment"
                )

    def _dtype(self) -> str:
        from lightning_verl.settings import compute_dtype

        return compute_dtype(self._config, self._device)

    def _start(self, *, again: bool = False) -> None:
        """Start the workers. Raises `EngineError` when they cannot be started, or `close` was called meanwhile."""
        from lightning_verl.settings import refuse_holes, teacher_config, worker_config
        from lightning_verl.worker_group import Alone, OnRay, connect

        opened, engine = self._ready(), self._config.engine
        made = worker_config(self._config, opened.model, opened.optimizer, seed=opened.seed, device=self._device)
        teacher = opened.reference and teacher_config(self._config, opened.reference, opened.optimizer, self._device)
        for each in (made, teacher):
            if each is not None and not again:
                refuse_holes(each)
        arguments = {
            "seed": opened.seed, "threads": engine.threads, "optimizer": opened.optimizer, "head": opened.head,
            "teacher": teacher, "max_model_len": served_length(self._config.policy_server),
        }  # fmt: skip
        group: Group | None = None
        settings = VerlConfig.of(self._config)
        try:
            if settings.world_size:
                self._own_cluster = connect(settings, self._device) or self._own_cluster
                group = OnRay(settings, made, arguments, self._device, again=again)
            else:
                group = Alone(made, arguments)
            self._ranks = group.run("place", [()] * group.size)
            self._group = group
        finally:
            if self._opened is None:  # `close` was called meanwhile, and could not end these workers
                self._group = None
                self._end(group)
        self._ready()

    def _again(self, call: Callable[[], T]) -> T:
        """Make a call when no other is under way, and return its result; see `_until_done`."""
        with self._turn:
            return self._until_done(call)

    def _until_done(self, call: Callable[[], T]) -> T:
        """Make a call and return its result. When workers die, they are started again and the call is repeated."""
        lost: WorkersLostError | None = None
        while True:
            try:
                if lost is not None:
                    self._revive(lost)
                return call()
            except WorkersLostError as error:
                lost = error

    def _revive(self, error: WorkersLostError) -> None:
        if self._opened is None:
            raise EngineError("the engine was closed while it computed") from error
        allowed, short, cure = VerlConfig.of(self._config).restarts, "out of memory" in str(error), "resume the run"
        longest, self._longest = self._longest, 0
        self._drop()
        if short:
            if self._budget <= longest:
                part, strategy = "a GPU's part of " * (self._sharing > 1), VerlConfig.of(self._config).strategy
                raise EngineError(
                    f"{error}; no smaller micro-batch is left, for {part}one row has {longest} tokens: set "
                    f"engine.gradient_checkpointing = true and resume; let more GPUs share a row ({SHARING[strategy]}); or "
                    f"{SMALLER_ROWS}"
                ) from error
            cure = (
                f"lower engine.tokens_per_microbatch, which is {self._budget} now, and resume the run; or {MORE_ROOM}"
            )
        steps = self._taken.steps
        if steps != self._died_at:  # a step was taken since, so earlier deaths no longer count
            self._restarts, self._died_at = 0, steps
        if self._restarts >= allowed:
            raise EngineError(f"{error}; engine.verl.restarts = {allowed} were used up: {cure}") from error
        if steps and (self._saved is None or self._saved[1].steps != steps):
            raise EngineError(
                f"{error}; the last checkpoint is older than step {steps}, so nothing can be done again from here "
                f"(trainer.checkpoint_every = 1 lets the engine go on by itself): {cure}"
            ) from error
        self._restarts += 1
        if short:
            self._budget = max(1, longest, self._budget // 2)
            logger.warning("out of memory: going on with %d tokens per micro-batch", self._budget)
        logger.warning("%s; starting the workers again after step %d", error, steps)
        self._start(again=True)
        if self._saved is not None:
            folder, taken = self._saved
            self._run("load", folder, taken.policy, taken.head)

    def _step(self, trained: Sequence[Sample], loss: Loss, lr: float | None) -> StepResult:
        self._summed, self._moved = (), (0, 0)
        result = self._driver.step(self, trained, loss, lr)
        self._note(result)
        return result

    def _note(self, result: StepResult) -> None:
        """Count a step that was taken. It is counted only at its end, because workers that die before it are brought back to
        its beginning."""
        if result.metrics["stepped"]:
            policy, head = self._moved
            self._taken = Taken(self._driver.steps, self._taken.policy + policy, self._taken.head + head)

    def _drop(self) -> None:
        """Forget the gradient; the workers drop theirs with the next one."""
        self._summed = ()
        self._driver.dropped()

    def _trainable(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the trained rows, each up to its last trained token. Raises `DataError` for rows that cannot be computed
        on."""
        self._checked(samples)
        if self._ready().head is None:
            refuse_targets(samples)
        return [rows.cut(sample, rows.trained_length(sample)) for sample in samples if rows.is_trained(sample)]

    def _moves(self, trained: Sequence[Sample]) -> tuple[bool, bool]:
        """Return whether a step on these rows has a gradient for the policy, and for the head. A part without a gradient is
        not updated, because with a gradient of 0 Adam would still move it. (With a head that trains the model the policy counts
        as having one whenever the head has, and its output layer is updated, too.)"""
        valued, head = any(span.value_weight for sample in trained for span in sample.spans), self._ready().head
        shared = valued and head is not None and head.trains_model
        return shared or any(bool(sample.weights.any()) for sample in trained), valued

    def _logprobs(self, samples: Sequence[Sample], tokens: Tokens, *, reference: bool) -> Numbers:
        """Return the logprobs (N,) of some tokens of rows, by the reference model or by the trained one."""
        found = self._read("logprobs", samples, reference=reference)
        return np.array(
            [found[row][column] for row, column in zip(tokens.rows, tokens.columns, strict=True)], np.float32
        )

    def _read(self, method: str, samples: Sequence[Sample], **named: Any) -> list[FloatArray]:
        """Return what a method of the workers computes for each row, in the order of the rows."""
        if not samples:
            return []
        found: dict[int, FloatArray] = {}
        for hand, own in self._dealt(method, samples, **named):
            found.update(zip(hand, own, strict=False))  # what filled the place up comes last and is nobody's
        return [found[index] for index in range(len(samples))]

    def _dealt(
        self, method: str, samples: Sequence[Sample], *arguments: Any, **named: Any
    ) -> list[tuple[list[int], Any]]:
        """Call a method with each place's rows. Return for each place the indices of its rows, and its answer."""
        places = max(place for place, _ in self._ranks) + 1
        hands = deal([len(sample) for sample in samples], places)
        count = max(len(hand) for hand in hands)
        shares = [share(samples, hand, count) for hand in hands]
        self._longest = math.ceil(max(len(sample) for sample in samples) / self._sharing)
        parts = [(shares[place], *arguments, max(self._budget, self._longest)) for place, _ in self._ranks]
        answers = self._working().run(method, parts, **named)
        self._longest = 0
        spoken = {place: answer for (place, speaks), answer in zip(self._ranks, answers, strict=True) if speaks}
        return [(hand, spoken[place]) for place, hand in enumerate(hands)]

    def _run(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """Make the same call on every rank, and return the answers."""
        group = self._working()
        return group.run(method, [arguments] * group.size, **named)

    def _working(self) -> Group:
        group = self._group
        if group is None:
            self._ready()
            raise EngineError("the workers of the verl engine have not been started: call open() again")
        return group


def _vocab_size(model: Path) -> int:
    check_config(model)
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise EngineError(f"cannot read the model's configuration in {model}: {error}") from error


def deal(lengths: Sequence[int], places: int) -> list[list[int]]:
    """Deal rows to places: return the indices of each place's rows, longest first, so that places have about equally many
    tokens. The last places may have one row less."""
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    hands: list[list[int]] = [[] for _ in range(places)]
    for turn, start in enumerate(range(0, len(order), places)):
        row = order[start : start + places]
        # To and fro: the place with the longest row of one round gets the shortest of the next.
        for place, index in zip(range(places) if turn % 2 == 0 else reversed(range(places)), row, strict=False):
            hands[place].append(index)
    return hands


def filler(sample: Sample) -> Sample:
    """Return a copy of a row without weights and spans, which is computed and counts for nothing."""
    zeros = np.zeros(len(sample), np.float32)
    return replace(sample, weights=zeros, spans=())


def share(samples: Sequence[Sample], hand: Sequence[int], count: int) -> list[Sample]:
    """Return the rows of a place, filled up to `count` with copies of the shortest row of all."""
    shortest = min(samples, key=len)
    return [*(samples[index] for index in hand), *[filler(shortest)] * (count - len(hand))]

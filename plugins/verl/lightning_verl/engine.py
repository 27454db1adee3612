"""The verl engine: our rows and losses on verl's workers, on any number of GPUs.

The invariant: the loss and its gradient are those of the rows alone. Whole rows are dealt to the data-parallel places, each row
to one place. All places get equally many rows, as collectives need; a row that only fills a place up has no weights and no
spans, so it is in no sum. Every rank's loss is a sum, so that the sum over ranks is that of the step. Of engines that share
workers (`job`) each trains the adapters of one policy, and a call has rows of one policy.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from lightning.batch import FloatArray, Sample
from lightning.engines import rows
from lightning.engines.export import UNTRAINABLE, contents
from lightning.engines.files import recover, whole_folder
from lightning.engines.loading import read_model, served_length, vocab_size
from lightning.engines.protocol import Engine, Head, Opening, OptimizerConfig, StepResult
from lightning.engines.rows import Numbers, Read, Tally, Tokens, trained_tokens
from lightning.engines.step import (
    NonFiniteError,
    StepDriver,
    is_prepared,
    no_head,
    prepared,
    refuse_targets,
)
from lightning.errors import ConfigError, EngineError
from lightning.losses.protocol import Loss, check_top_logprobs
from lightning.plugins import plugins
from lightning.types import Json

from lightning_verl.config import VerlConfig, whole_alpha
from lightning_verl.job import Job, Opened
from lightning_verl.megatron_settings import layout, refuse_beside, refuse_loss
from lightning_verl.sender import FirstWorker
from lightning_verl.state import Taken, check_seen, read_state, write_state

if TYPE_CHECKING:
    from lightning.config import Config, LoraConfig

    from lightning_verl.passes import Report

logger = logging.getLogger(__name__)


class VerlEngine:
    """Trains on verl's workers. Implements `Engine`, `SharesBase` and `WritesAdapters` of `lightning.engines.protocol`. Its
    settings are `Config.engine` and `Config.engine.verl`."""

    revives_workers: Literal[True] = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self._made = Job(config)
        self._job, self._number = self._made, 0
        """The workers, perhaps those of another engine, and this engine's number among those that share them."""
        self.taken = Taken()
        """The steps so far; see `job.Member`."""
        self.saved: tuple[Path, Taken] | None = None
        self._sends = threading.Lock()
        """Held during one call of a transfer, because the call that leaves the group is made while another is under way."""
        self._driver = StepDriver(config.engine.max_nonfinite_steps)
        self._moved = (0, 0)
        """How many updates of the present step changed the policy and the head."""
        self._summed: Sequence[Sample] = ()
        """The rows of the present gradient."""

    def check(self, model: Path) -> str:
        """Check that the model folder can be trained, and return remarks on it. Raises `ConfigError` for FP8 weights, and for
        policies that one model in the workers cannot train."""
        _refuse_policies(self._config)
        if self.lora is not None:
            whole_alpha(self.lora)
        found = contents(model, lora=self.lora, max_model_len=served_length(self._config.policy_server))
        if found.fp8:
            raise ConfigError(f"the weights in {model} are FP8, which verl does not train: {UNTRAINABLE}")
        return found.remark()

    def check_loss(self, model: Path, loss: Loss) -> None:
        """Check that the loss gets the most probable tokens that it wants (`ChecksLoss`)."""
        refuse_loss(self._config, loss)
        check_top_logprobs(loss, vocab_size(model))

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
        self.open_sharing(model, Opening(optimizer, seed, head), (), reference=reference)

    def open_sharing(
        self,
        model: Path,
        own: Opening,
        others: Sequence[tuple[Engine, Opening]],
        *,
        reference: Path | None = None,
    ) -> None:
        """Start workers that have the model once, with the adapters of this engine and of the `others`
        (`SharesBase.open_sharing`)."""
        if self._config.engine.step == "tree":
            logger.info("rows are computed one by one, not as a tree: verl's models take packed rows")
        members = [self, *(other for other, _ in others if isinstance(other, VerlEngine))]
        adapters = [member.lora for member in members]
        if others and (len(members) <= len(others) or not all(adapters)):
            raise EngineError("only adapters share a base model: set engine.lora for all verl engines that share one")
        self._made.close()
        refuse_beside(self._config, head=own.head, teacher=reference is not None)
        learners = [own, *(its for _, its in others)]
        for number, (member, its) in enumerate(zip(members, learners, strict=True)):
            member.join(self._made, number, its)
        self._job.open(Opened(model, vocab_size(model), learners, [*filter(None, adapters[1:])], reference), members)

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters; None if all weights are trained."""
        return self._config.engine.lora

    def join(self, job: Job, number: int, own: Opening) -> None:
        """Compute on the workers of a job from now on, as its engine with this number, from the beginning."""
        self._job, self._number = job, number
        self.taken, self.saved = Taken(), None
        self._driver.begin(own.optimizer, own.seed)
        self.discard_gradient()

    def discard_gradient(self) -> None:
        """Forget the gradient; the workers drop theirs with the next one."""
        self._summed = ()
        self._driver.dropped()

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the current policy's logprobs, shape (T,) for each row; index 0 is NaN."""
        self._checked(samples)
        return self._job.again(lambda: self._read("logprobs", samples, reference=False))

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the head's values of the state before each span, shape (spans,) for each row."""
        self._checked(samples)
        if self._own.head is None:
            raise no_head()
        valued = [rows.cut(sample, max(span.start for span in sample.spans)) for sample in samples if sample.spans]
        found = iter(self._job.again(lambda: self._read("values", valued)))
        return [next(found) if sample.spans else np.zeros(0, np.float32) for sample in samples]

    def step(self, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        """Take a step on the sum of the rows' losses, as `StepDriver` does.

        Raises `DataError` for rows that cannot be computed on, and `EngineError` when too many updates in a row are not finite
        (`engine.max_nonfinite_steps`). Workers that die are started again from the last checkpoint, if it is that of the last
        step, and the whole step is repeated.
        """
        trained = self._trainable(samples, loss)
        return self._job.again(lambda: self._step(trained, loss, lr))

    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Add the gradient of these rows to the present one. Workers that die lose the gradient, so that is an error here."""
        trained = self._trainable(samples, loss)
        with self._job.turn:
            try:
                return self._driver.forward_backward(self, trained, loss)
            except BaseException:
                self.discard_gradient()
                raise

    def optim_step(self, lr: float | None = None) -> StepResult:
        """Clip the gradient, update at the rate `lr` (None: the optimizer's), and drop the gradient."""
        self._ready()
        with self._job.turn:
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
        return prepared(loss, samples, tokens, lambda: Read(current()), reference)

    def accumulate(self, samples: Sequence[Sample], loss: Loss, step: int) -> Tally:
        """Add the gradient of these rows. Raises `EngineError` for an error of the loss, `NonFiniteError` where a loss is not
        finite; the gradient is then dropped."""
        added = bool(self._summed)
        reports: list[Report] = [
            report for _, report in self._job.dealt(self._number, "accumulate", samples, loss, step, added)
        ]
        problems = [report.problem for report in reports if report.problem]
        nonfinite = [report.nonfinite for report in reports if report.nonfinite]
        if problems or nonfinite:
            self._summed = ()
            self._job.run(self._number, "discard")
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
        norms: dict[str, float] = self._job.run(self._number, "update", lr if policy else None, lr if head else None)[0]
        if not all(map(math.isfinite, norms.values())):
            raise NonFiniteError(f"the gradient is not finite at step {step}")
        self._moved = (self._moved[0] + policy, self._moved[1] + head)
        return norms

    def save(self, folder: Path) -> None:
        """Write the whole training state to a folder, atomically. An existing folder is replaced."""
        own, taken = self._own, self.taken
        with self._job.turn, whole_folder(folder) as path:
            for host, files in self._job.run(self._number, "save", path.resolve(), taken.policy):
                check_seen(host, [path / file for file in files], folder)
            write_state(path, taken, own.optimizer, own.head, layout(self._config))
        self.saved = folder.resolve(), taken

    def state_moved(self, folder: Path) -> None:
        """Note that the state which was saved last is now in this folder, where workers that die are started from."""
        if self.saved is not None:
            self.saved = folder.resolve(), self.saved[1]

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, with any number of workers (Megatron: with as many, and the same parallel sizes). The
        optimizer's settings stay those of `open`."""
        own = self._own
        recover(folder)
        taken = read_state(folder, own.head, layout(self._config))
        self._job.again(lambda: self._job.run(self._number, "load", folder.resolve(), taken.policy, taken.head))
        self.taken, self.saved, self._driver.steps = taken, (folder.resolve(), taken), taken.steps
        self.discard_gradient()

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
        if self.lora is None:
            return None
        arguments = opened.model.resolve(), file.resolve(), self._dtype()
        if not all(self._job.again(lambda: self._job.run(self._number, "write_adapters", *arguments))):
            return None
        check_seen("the first worker's machine", [file], file)
        return file

    def _written(self, target: Path, seen: Path, *, model: bool) -> Path:
        source = self._ready().model.resolve()
        self._job.again(
            lambda: self._job.run(self._number, "write", source, target.resolve(), self._dtype(), model=model)
        )
        check_seen("the first worker's machine", [seen], target)
        return target

    def numerics(self) -> dict[str, Json]:
        """The numeric settings of the computation (`trainer.context.Numeric`)."""
        self._ready()
        return {
            "dtype": self._dtype(),
            "device": f"{max(1, VerlConfig.of(self._config).world_size)} x {self._job.device}",
            "threads": self._config.engine.threads,
            "tokens_per_microbatch": self._job.budget,
        }

    def sender(self) -> FirstWorker:
        """The sender of weights: the first worker, which writes the file of `weights`."""
        return FirstWorker(self._sending, self._made.turn, self._config.engine)

    def close(self) -> None:
        """End the workers, also for the engines that share them, and the cluster if it was started here. Idempotent."""
        self._job.close()

    def _ready(self) -> Opened:
        return self._job.ready()

    @property
    def _own(self) -> Opening:
        return self._ready().learners[self._number]

    def _sending(self, method: str, *arguments: object) -> tuple[Any, str]:
        """Call a method of the first worker's sender, and return its answer and its error. The caller must hold
        `Job.turn`."""
        with self._sends:
            answer: tuple[Any, str] = self._job.until_done(
                lambda: self._job.run(self._number, "sending", method, arguments)
            )[0]
        return answer

    def _checked(self, samples: Sequence[Sample]) -> Opened:
        opened = self._ready()
        for sample in samples:
            rows.check(sample, opened.vocab_size)
        return opened

    def _dtype(self) -> str:
        from lightning_verl.settings import compute_dtype

        return compute_dtype(self._config, self._job.device)

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
            self.taken = Taken(self._driver.steps, self.taken.policy + policy, self.taken.head + head)

    def _trainable(self, samples: Sequence[Sample], loss: Loss) -> list[Sample]:
        """Return the trained rows, each up to its last trained token. Raises `DataError` for rows that cannot be computed
        on, and what `check_loss` does."""
        refuse_loss(self._config, loss)
        check_top_logprobs(loss, self._checked(samples).vocab_size)
        if self._own.head is None:
            refuse_targets(samples)
        return [rows.cut(sample, rows.trained_length(sample)) for sample in samples if rows.is_trained(sample)]

    def _moves(self, trained: Sequence[Sample]) -> tuple[bool, bool]:
        """Return whether a step on these rows has a gradient for the policy, and for the head. A part without a gradient is
        not updated, because with a gradient of 0 Adam would still move it. (With a head that trains the model the policy counts
        as having one whenever the head has, and its output layer is updated, too.)"""
        valued, head = any(span.value_weight for sample in trained for span in sample.spans), self._own.head
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
        for hand, own in self._job.dealt(self._number, method, samples, **named):
            found.update(zip(hand, own, strict=False))  # what filled the place up comes last and is nobody's
        return [found[index] for index in range(len(samples))]


def _refuse_policies(config: Config) -> None:
    """Raise `ConfigError` for several policies that are not adapters of one model: the workers have one model in memory."""
    several, verl = plugins().policy_set(config), VerlConfig.of(config)
    trained = {} if several is None else several.adapters
    if several is None or len(trained) < 2:
        return
    if verl.strategy == "megatron":
        raise ConfigError(
            f"engine.verl.strategy = megatron trains all weights of one model, and not the policies {', '.join(trained)}: set "
            "engine.verl.strategy = fsdp2, which trains adapters of each (engine.lora)"
        )
    if whole := [name for name, lora in trained.items() if lora is None]:
        raise ConfigError(
            f"all weights of the policy {whole[0]} are trained, and the engine verl trains several policies as adapters of one "
            f"model: set policies.{whole[0]}.lora.rank or engine.lora.rank, or engine = torch"
        )
    bases = {name: several.bases.get(name, "the run's model") for name in trained}
    if len({*bases.values()}) > 1:
        begin = ", ".join(f"{name} as {base}" for name, base in bases.items())
        raise ConfigError(
            f"the engine verl trains several policies on one model, and these begin as different models ({begin}): give them "
            "the same policies.NAME.base, or set engine = torch"
        )
    if "lora_adapter_path" in verl.model:
        raise ConfigError(
            "engine.verl.model.lora_adapter_path would be the adapters of the first policy alone: leave it out"
        )

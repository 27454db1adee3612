"""The verl engine: our rows and losses on verl's workers, however many GPUs they are.

The invariant: the loss and its gradient are those of the rows alone. Rows are dealt out to ranks whole; where they cannot
be dealt evenly some get a copy of a row without weights; and every rank's loss is a sum, so that their sum is the step's.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lightning.batch.sample import FloatArray, Sample
from lightning.engines import rows
from lightning.engines.files import recover, whole_folder
from lightning.engines.prepare import prepared_by, with_numbers
from lightning.engines.protocol import OptimizerConfig, StepResult
from lightning.engines.tally import Tally
from lightning.engines.tokens import Numbers, Tokens, trained_tokens
from lightning.engines.verl.deal import deal, share
from lightning.engines.verl.device import choose
from lightning.errors import EngineError, WorkersLostError
from lightning.losses.protocol import Loss, StepLoss, needs_reference

if TYPE_CHECKING:
    from lightning.config import Config
    from lightning.engines.verl.group import Group
    from lightning.engines.verl.passes import Report

logger = logging.getLogger(__name__)
T = TypeVar("T")
FORMAT = 1
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class _Opened:
    """What `open` was called with, so that workers that died can be made again."""

    model: Path
    optimizer: OptimizerConfig
    seed: int
    vocab_size: int


class VerlEngine:
    """Implements `lightning.engines.protocol.Engine`. All that is set is in `Config.engine` and `Config.engine.verl`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._device = ""
        self._opened: _Opened | None = None
        self._group: Group | None = None
        self._own_cluster = False
        self._ranks: list[tuple[int, bool]] = []
        self._steps = 0
        self._saved: tuple[Path, int] | None = None
        self._restarts = 0
        self._budget = config.engine.tokens_per_microbatch

    def open(self, model: Path, optimizer: OptimizerConfig, *, seed: int, critic: bool = False) -> None:
        """Start the workers and load a model folder, which every machine of the cluster must see."""
        if critic:
            raise EngineError(
                'the verl engine has no critic: use Trainer(engine="torch") for algorithms that value states, or one '
                "that needs none (grpo, rloo, dapo, ...)"
            )
        if self._config.engine.step == "tree":
            logger.info("rows are computed one by one, not as a tree: verl's models take packed rows")
        self.close()
        self._device = choose(self._config.engine.device)
        self._opened = _Opened(model, optimizer, seed, _vocab_size(model))
        self._steps, self._saved = 0, None
        self._start()

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Current policy's logprobs, shape (T,) each; index 0 is NaN."""
        self._checked(samples)
        return self._again(lambda: self._read(samples, reference=False))

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """There is no critic: raises `EngineError`."""
        raise EngineError("the verl engine has no critic")

    def step(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """One optimizer step on the sum of the rows' losses. Without any weight no step is taken (`stepped` is 0).

        Raises `DataError` for a row that cannot be computed on and `EngineError` for a loss or gradient that is not finite;
        the weights are then as before. Workers that die are made again from the last checkpoint, if that is the last step's.
        """
        self._checked(samples)
        trained = [_cut(sample) for sample in samples if rows.is_trained(sample)]
        if not trained:
            return StepResult({**Tally().metrics(), "grad_norm": 0.0, "lr": 0.0, "stepped": 0.0}, {})
        return self._again(lambda: self._step(trained, loss))

    def save(self, folder: Path) -> None:
        """Write the whole training state to a folder, atomically; one that exists is replaced."""
        opened = self._ready()
        with whole_folder(folder) as path:
            for host, files in self._run("save", path.resolve(), self._steps):
                _check_seen(host, [path / file for file in files], folder)
            state = {"format": FORMAT, "engine": "verl", "steps": self._steps, "optimizer": asdict(opened.optimizer)}
            (path / _STATE).write_text(json.dumps(state, indent=1) + "\n")
        self._saved = folder.resolve(), self._steps

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, with however many workers; the optimizer's settings stay those given to `open`."""
        self._ready()
        recover(folder)
        steps = _read_state(folder)
        self._again(lambda: self._run("load", folder.resolve(), steps))
        self._steps, self._saved = steps, (folder.resolve(), steps)

    def export(self, folder: Path) -> Path:
        """Write a model folder that `transformers` and vLLM load, LoRA merged; return it."""
        opened = self._ready()
        self._again(lambda: self._run("write_model", opened.model.resolve(), folder.resolve(), self._dtype()))
        _check_seen("the first worker's machine", [folder / "config.json"], folder)
        return folder

    def weights(self, file: Path) -> Path:
        """Write the current full weights as one safetensors file, LoRA merged; return it."""
        self._ready()
        self._again(lambda: self._run("write_weights", file.resolve(), self._dtype()))
        _check_seen("the first worker's machine", [file], file)
        return file

    def close(self) -> None:
        """End the workers, and the cluster if it was started here. Idempotent."""
        if self._group is not None:
            self._group.close()
        if self._own_cluster:
            import ray

            ray.shutdown()
        self._group, self._opened, self._own_cluster = None, None, False

    def _ready(self) -> _Opened:
        if self._opened is None:
            raise EngineError("the engine has no model: call open() first")
        return self._opened

    def _checked(self, samples: Sequence[Sample]) -> None:
        opened = self._ready()
        for sample in samples:
            rows.check(sample, opened.vocab_size)

    def _dtype(self) -> str:
        from lightning.engines.verl.settings import compute_dtype

        return compute_dtype(self._config, self._device)

    def _start(self, *, again: bool = False) -> None:
        """Make the workers, and bring them to where the run is. Raises `EngineError` when no checkpoint is of there."""
        from lightning.engines.verl.group import Alone, OnRay, connect
        from lightning.engines.verl.settings import worker_config

        opened, engine = self._ready(), self._config.engine
        made = worker_config(self._config, opened.model, opened.optimizer, seed=opened.seed, device=self._device)
        arguments = {"seed": opened.seed, "threads": engine.threads}
        if engine.verl.world_size:
            self._own_cluster = connect(engine.verl, self._device) or self._own_cluster
            self._group = OnRay(engine.verl, made, arguments, self._device, again=again)
        else:
            self._group = Alone(made, arguments)
        self._ranks = self._run("place")

    def _again(self, call: Callable[[], T]) -> T:
        """What a call returns; when workers die, they are made again and it is made again."""
        lost: WorkersLostError | None = None
        while True:
            try:
                if lost is not None:
                    self._revive(lost)
                return call()
            except WorkersLostError as error:
                lost = error

    def _revive(self, error: WorkersLostError) -> None:
        allowed = self._config.engine.verl.restarts
        if self._restarts >= allowed:
            raise EngineError(f"{error}; engine.verl.restarts = {allowed} were used up: resume the run") from error
        if self._steps and (self._saved is None or self._saved[1] != self._steps):
            raise EngineError(
                f"{error}; the last checkpoint is older than step {self._steps}, so nothing can be done again from here: "
                "resume the run (trainer.checkpoint_every = 1 lets the engine go on by itself)"
            ) from error
        self._restarts += 1
        if "out of memory" in str(error):
            self._budget = max(1, self._budget // 2)
            logger.warning("going on with %d tokens per micro-batch", self._budget)
        logger.warning("%s; starting the workers again at step %d", error, self._steps)
        self._start(again=True)
        if self._saved is not None:
            self._run("load", self._saved[0], self._steps)

    def _step(self, trained: Sequence[Sample], loss: Loss) -> StepResult:
        if isinstance(loss, StepLoss) or needs_reference(loss):
            trained = self._prepared(trained, loss)
        tally = Tally()
        report: Report
        for _, report in self._dealt("accumulate", trained, loss, self._steps):
            if report.problem:
                self._run("discard")
                raise EngineError(f"{report.problem}, so the step was not taken and the weights are as before")
            tally.merge(report.tally)
        optimizer = self._ready().optimizer
        lr = optimizer.lr * min(1.0, (self._steps + 1) / max(1, optimizer.warmup_steps))
        norm = self._run("update", lr)[0]
        if not math.isfinite(norm):
            raise EngineError(
                f"the gradient is not finite at step {self._steps}, so the step was not taken and the weights are as "
                "before: lower engine.lr or use float32"
            )
        self._steps += 1
        return StepResult({**tally.metrics(), "grad_norm": norm, "lr": lr, "stepped": 1.0}, tally.seen)

    def _prepared(self, samples: Sequence[Sample], loss: Loss) -> list[Sample]:
        """The rows with what the loss wants to know of their trained tokens before the gradient pass."""
        tokens = trained_tokens(samples)
        reference: Numbers | None = None
        prepared: Numbers | None = None
        if needs_reference(loss):
            reference = _chosen(self._read(samples, reference=True), tokens)
        if isinstance(loss, StepLoss) and len(tokens):
            current = _chosen(self._read(samples, reference=False), tokens)
            prepared = prepared_by(loss, samples, tokens, current, reference)
        return with_numbers(samples, tokens, reference, prepared)

    def _read(self, samples: Sequence[Sample], *, reference: bool) -> list[FloatArray]:
        """Logprobs (T,) of rows, in their order."""
        if not samples:
            return []
        found: dict[int, FloatArray] = {}
        for hand, own in self._dealt("logprobs", samples, reference=reference):
            found.update(zip(hand, own, strict=False))  # what filled the place up comes last and is nobody's
        return [found[index] for index in range(len(samples))]

    def _dealt(
        self, method: str, samples: Sequence[Sample], *arguments: Any, **named: Any
    ) -> list[tuple[list[int], Any]]:
        """For each place the numbers of its rows, and what it answers about them."""
        assert self._group is not None, "open() makes the group"
        hands = deal([len(sample) for sample in samples], self._places())
        count = max(len(hand) for hand in hands)
        shares = [share(samples, hand, count) for hand in hands]
        budget = max(self._budget, *(len(sample) for sample in samples))
        parts = [(shares[place], *arguments, budget) for place, _ in self._ranks]
        answers = self._group.run(method, parts, **named)
        spoken = {place: answer for (place, speaks), answer in zip(self._ranks, answers, strict=True) if speaks}
        return [(hand, spoken[place]) for place, hand in enumerate(hands)]

    def _places(self) -> int:
        return max(place for place, _ in self._ranks) + 1

    def _run(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """The same call on every rank."""
        assert self._group is not None, "open() makes the group"
        return self._group.run(method, [arguments] * self._group.size, **named)


def _check_seen(host: str, files: Sequence[Path], target: Path) -> None:
    """Raises `EngineError` when a worker wrote to a disk that this machine does not see."""
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise EngineError(
            f"{host} wrote {', '.join(missing) or 'nothing'} where the trainer's machine does not see it: every machine of the "
            f"cluster must see {target.resolve()} under this path, on a disk that all share"
        )


def _cut(sample: Sample) -> Sample:
    """A row up to its last trained token: what follows cannot influence the loss."""
    stop = slice(rows.trained_length(sample))
    arrays = ("ids", "weights", "advantages", "logprobs", "versions")
    return replace(sample, **{name: getattr(sample, name)[stop] for name in arrays})


def _chosen(logprobs: Sequence[FloatArray], tokens: Tokens) -> Numbers:
    """Logprobs (N,) of some tokens of rows."""
    return np.array(
        [logprobs[row][column] for row, column in zip(tokens.rows, tokens.columns, strict=True)], np.float32
    )


def _vocab_size(model: Path) -> int:
    if not (model / "config.json").is_file():
        raise EngineError(
            f"{model} is not a model folder: it has no config.json. Give a folder that transformers can load"
        )
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(model, local_files_only=True).get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise EngineError(f"cannot read the model's configuration in {model}: {error}") from error


def _read_state(folder: Path) -> int:
    """The steps after which a state was saved. Raises `EngineError` for one that is not the verl engine's."""
    try:
        state: Mapping[str, Any] = json.loads((folder / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder} holds no training state: {error}") from error
    if state.get("engine") != "verl" or state.get("format") != FORMAT:
        raise EngineError(
            f"{folder} holds a training state of another engine or version: go on with the one that wrote it, or start anew "
            "from the model that `lightning export` writes"
        )
    return int(state["steps"])

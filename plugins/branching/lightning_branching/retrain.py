"""Train a whole run again from its store: take each committed step again, and compare its weights with the recorded ones.

The invariant: the verdict "equal" is given only if every step was taken again and the weights after each have the recorded
digest. If there is no verdict, the result says why. The run itself is not changed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning.config import Config
from lightning.engines.protocol import Engine, WritesAdapters
from lightning.errors import AuditError, ConfigError, LightningError
from lightning.plugins import plugins
from lightning.policy_server.model_folder import hash_weights
from lightning.policy_server.weights import FILES
from lightning.safe_text import counted
from lightning.store.protocol import PRUNED, Store
from lightning.trainer.checkpoints import Checkpoints
from lightning.trainer.context import NUMERIC, Epoch, Numeric, base_digest, epoch_at, machine, read_epochs
from lightning.trainer.run_stages import FORKED, MODEL
from lightning.types import Json, Run, StepRecord
from lightning_proof.bring_forward import Rewinder
from lightning_proof.fork import model_of
from lightning_proof.recorded_step import OWN_LOOP
from lightning_verl.config import VerlConfig

WEIGHTS: Final = "weights.safetensors"
"""The weights of a checkpoint of the torch engine."""


@dataclass(frozen=True, slots=True)
class Retraining:
    """The result of training a run again. `equal` is None if equality could be neither proven nor disproven; `why` says why, or
    what differs.

    `step` is the first step whose weights differ. `steps` were taken again; the weights after `compared` of them were compared
    with a recorded digest.
    """

    run: str
    steps: int
    compared: int
    equal: bool | None
    why: str = ""
    step: int | None = None

    def __str__(self) -> str:
        seen = f"{self.run}: {counted(self.steps, 'step')} taken again, the weights of {self.compared} compared"
        if self.equal:
            return f"{seen}: equal, bit for bit"
        if self.equal is None:
            return f"{self.run} cannot be proven: {self.why}"
        return f"{seen}: step {self.step} differs: {self.why}"


class _DiffersError(LightningError):
    """The weights after this number of steps are not the recorded ones."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step, self.why = step, why


async def retrain(
    store: Store,
    run_id: str,
    folder: Path,
    said: Callable[[str], object] = lambda text: None,
    model: Path | None = None,
) -> Retraining:
    """Train a run again, from its model and its store. `folder` is the run's folder; `said` is called with a text for each
    step; `model` is the folder of the model that the run began with, if that has moved.

    Raises `ConfigError` for a run that the store does not have.
    """
    run = await store.get_run(run_id)
    if run is None:
        raise ConfigError(f"the store does not know the run {run_id}")
    records = await store.steps(run_id)
    model = model or model_of(run, folder)
    if why := await _unprovable(store, run, records, folder, model):
        return Retraining(run_id, 0, 0, None, why)
    with tempfile.TemporaryDirectory() as scratch:
        epochs = await read_epochs(store, run)
        watcher = _Watcher(records, epochs, folder, Path(scratch), said)
        rewinder = Rewinder(
            store,
            records,
            epochs,
            Checkpoints(Path(scratch) / "checkpoints", keep=1),
            plugins().engine(str(run.config.get("engine", "torch"))),
            model,
            Config(),
            between=Path(scratch) / "between",
            machine_at=lambda step: _machine_settings(records[min(step, len(records)) - 1]),
            folder=folder,
        )
        try:
            await rewinder.bring_to(len(records), watcher.end, watcher.before)
        except _DiffersError as found:
            if watcher.other_numbers:
                return Retraining(run_id, found.step, watcher.compared, None, f"{found.why}; {watcher.other_numbers}")
            return Retraining(run_id, found.step, watcher.compared, False, found.why, found.step)
        except AuditError as error:
            return Retraining(run_id, watcher.taken, watcher.compared, False, str(error), watcher.taken + 1)
        except LightningError as error:
            return Retraining(run_id, watcher.taken, watcher.compared, None, str(error))
    steps = len(records)
    if watcher.compared < steps:
        why = f"the weights after {steps - watcher.compared} of {counted(steps, 'step')} are nowhere recorded"
        return Retraining(run_id, steps, watcher.compared, None, f"{why} (the last ones would be in a checkpoint)")
    return Retraining(run_id, steps, watcher.compared, True)


async def _unprovable(store: Store, run: Run, records: Sequence[StepRecord], folder: Path, model: Path) -> str:
    """Return the reason why nothing can be proven about a run; empty if its steps can be taken again."""
    if not records:
        return "it has no committed step"
    if own := [record.step for record in records if record.context.get(OWN_LOOP)]:
        return f"step {own[0]} was taken by a loop of its own (Trainer.session), and only that can take it again"
    pruned = await store.get_state(run.id, PRUNED)
    if isinstance(pruned, Mapping) and pruned.get("trained"):
        return "calls that it was trained on were removed (lightning db prune --trained)"
    return await asyncio.to_thread(_unlike, run, records[0].context, folder, model)


def _unlike(run: Run, context: Mapping[str, Json], folder: Path, model: Path) -> str:
    """Return the reason why a run's beginning cannot be restored: a changed or missing model, or missing digests; empty if it
    can."""
    if "weights" not in context:
        return "its steps do not record the digests of their weights"
    if not model.is_dir():
        return f"the model that it began with is not at {model}: say where it is (--model)"
    if (recorded := context.get("base")) and base_digest(model) != recorded:
        return f"the files of the model at {model} are not those that it began with"
    if FORKED in run.config and not (folder / MODEL).is_dir():
        return f"it began with the weights and the optimizer of {run.config[FORKED]}, which are not kept"
    return ""


def _machine_settings(record: StepRecord) -> Mapping[str, object]:
    """Return the settings of the engine that were in effect when a step was computed; of numbers that differed between policies
    the least. The section `verl` is this machine's own, because it names hosts and modules that workers import."""
    found = {name: record.context.get(name) for name in ("threads", "tokens_per_microbatch")}
    least = {name: _least(value) if isinstance(value, Mapping) else value for name, value in found.items()}
    known = {name: value for name, value in least.items() if value}
    device = str(record.context.get("device") or "auto")  # of a GPU it is the product's name
    return {**known, "device": device if device in ("auto", "cpu") else "cuda", "verl": VerlConfig()}


def _least(by_policy: Mapping[str, Json]) -> float | None:
    """Return the least number of the policies that have one."""
    return min((number for number in by_policy.values() if isinstance(number, int | float)), default=None)


class _Watcher:
    """Compares the engine's weights with the recorded digests, before each step and at the end."""

    def __init__(
        self,
        records: Sequence[StepRecord],
        epochs: Sequence[Epoch],
        folder: Path,
        scratch: Path,
        said: Callable[[str], object],
    ) -> None:
        self._records, self._epochs, self._folder, self._scratch, self._said = records, epochs, folder, scratch, said
        self._first = ""
        self.compared = 0
        self.taken = 0
        self.other_numbers = ""
        """A sentence that names the differences of the numeric context from the recorded one; empty without any."""

    def before(self, engine: Engine, record: StepRecord) -> None:
        """Compare the weights before a step that the engine is about to take again. Raises `_DiffersError`."""
        self.taken = record.step - 1
        now = (engine.numerics() if isinstance(engine, Numeric) else {}) | machine()
        other = [key for key in NUMERIC if key in now and record.context.get(key, now[key]) != now[key]]
        if other:
            changed = ", ".join(f"{key} {record.context[key]!s:.80} → {now[key]!s:.80}" for key in other)
            self.other_numbers = f"it is computed with another {changed} than when it was trained"
        if self.taken:
            self._compare(engine, record)
        else:
            self._first = self._digest(engine, record)
        self._said(f"step {record.step}")

    def end(self, engine: Engine) -> None:
        """Compare the weights after the last step with the run's last checkpoint, if there is one. Raises `_DiffersError`."""
        self.taken = steps = len(self._records)
        kept = self._checkpoint(steps)
        if not kept:
            return
        engine.save(self._scratch / "end")
        made = _weights_in(self._scratch / "end")
        if not made:  # another engine's checkpoint
            return
        self.compared += 1
        if made.keys() != kept.keys():
            raise _DiffersError(steps, "its checkpoint has other policies")
        for policy, file in made.items():
            if hash_weights(file) != hash_weights(kept[policy]):
                which = f"the weights of {policy}" if policy else "the weights"
                far = _distance(file, kept[policy])
                raise _DiffersError(steps, f"{which} after it are others than in its checkpoint{far}")

    def _compare(self, engine: Engine, record: StepRecord) -> None:
        recorded, step = str(record.context.get("weights", "")), self.taken
        if not recorded:
            return
        if recorded == record.context.get("base"):  # the model's own: no step before has changed them
            recorded = self._first
        self.compared += 1
        if self._digest(engine, record) != recorded:
            kept, made = self._checkpoint(step), self._scratch / "now"
            far = ""
            if kept:
                engine.save(made)
                now = _weights_in(made)
                far = "".join(_distance(now[policy], kept[policy]) for policy in now.keys() & kept.keys())
            raise _DiffersError(step, f"the weights after it have another digest than the recorded one{far}")

    def _digest(self, engine: Engine, record: StepRecord) -> str:
        """Return the digest of the weights that the policy server got: only the adapters if the server merges them itself."""
        file, epoch = self._scratch / WEIGHTS, epoch_at(self._epochs, record.step)
        attached = epoch.setting("policy_server", "attach")
        alone = not attached and (epoch.setting("policy_server", "weight_transfer") or "auto") in FILES
        adapters = engine.adapters(file) if alone and isinstance(engine, WritesAdapters) else None
        return hash_weights(adapters or engine.weights(file))

    def _checkpoint(self, step: int) -> dict[str, Path]:
        return _weights_in(self._folder / "checkpoints" / f"step-{step:08d}")


def _weights_in(state: Path) -> dict[str, Path]:
    """Return the files of weights in a training state by policy, "" for the one policy of a run; none of another engine."""
    if (state / WEIGHTS).is_file():
        return {"": state / WEIGHTS}
    return {file.parent.name: file for file in sorted(state.glob(f"*/{WEIGHTS}"))}


def _distance(made: Path, kept: Path) -> str:
    """Return a text with the largest difference between two files of weights."""
    from safetensors.torch import load_file

    ours, theirs = load_file(made), load_file(kept)
    if ours.keys() != theirs.keys():
        return " (and other tensors)"
    most = max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
    return f", by up to {most:.3g}"

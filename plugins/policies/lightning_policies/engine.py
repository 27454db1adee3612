"""The engine of several policies: one engine for each trained policy. Those of adapters share their base model in memory.

The invariant: a policy's weights, optimizer and head change by the policy's own rows alone, bit for bit as in an engine that
trains this policy by itself. The gradient of each policy is clipped by its own norm (`engine.max_grad_norm`), and an update
that is not finite is skipped for its policy alone, so no policy crowds out another or holds it back. If an error comes after
some policies have taken their update of a step and others have not, the engine refuses everything but `load` and `close`: no
half of a step is saved or served, and no update is taken twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, runtime_checkable

import torch
from lightning.batch import FloatArray, Sample
from lightning.config import Config, LoraConfig
from lightning.engines.export import write_adapters
from lightning.engines.files import recover, whole_file, whole_folder
from lightning.engines.loading import WRAPPER, add_adapters, read_model
from lightning.engines.protocol import (
    ChecksModel,
    ChecksTeacher,
    Engine,
    Head,
    Opening,
    OptimizerConfig,
    SendsWeights,
    SharesBase,
    StepResult,
    WritesAdapters,
)
from lightning.engines.rows import name as row_name
from lightning.engines.step import NonFiniteError, check_loss
from lightning.errors import ConfigError, DataError, EngineError
from lightning.losses.protocol import Loss
from lightning.policy_server.model_folder import ADAPTERS, ADAPTERS_OF_ALL, LORA_A, LORA_B, POLICIES
from lightning.trainer.context import Numeric
from lightning.types import Json
from safetensors import safe_open
from safetensors.torch import save_file

from lightning_policies.bases import folders_of
from lightning_policies.transfer import part_of

logger = logging.getLogger(__name__)

EXPORTED = "adapters"
"""The subfolder of an export that holds a PEFT adapter folder for each policy, so no policy has this name."""

NOT_ALONE = (
    "its adapters cannot be given to vLLM alone, because the model folder stores one of their matrices under another name, "
    "transposed, fused with others or in FP8: name other modules in engine.lora.target_modules"
)

COUNTS = frozenset({"tokens", "tokens_forward", "tokens_compared", "microbatches", "updates", "skipped_nonfinite"})
"""Metrics of a step that add up over policies."""
MAXIMA = frozenset({"stepped", "tree", "max_logprob_gap", "p999_logprob_gap"})
"""Metrics of a step whose largest value holds for all policies, besides those whose names end in `_max`. Of the share of tokens
that have at most the gap `p999_logprob_gap` the largest is a bound for each policy."""
TOLD = (
    "loss", "grad_norm", "gradient_share", "tokens", "entropy", "clip_fraction", "max_logprob_gap", "mean_logprob_gap", "lr",
    "updates", "skipped_nonfinite",
)  # fmt: skip
"""Metrics of a step that are also reported for each policy that had rows, as `policy/NAME/METRIC`."""


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """The settings of a trained policy: its adapters (None: all weights are trained), its learning rate, and the model that it
    begins as (None: those of the run)."""

    lora: LoraConfig | None
    lr: float | None = None
    base: str | None = None


@runtime_checkable
class AdapterEngine(Engine, SharesBase, WritesAdapters, Protocol):
    """An engine that trains one policy, and may train adapters beside other engines on the same base model."""


@runtime_checkable
class RevivesFromState(Protocol):
    """An engine that may read its last training state again by itself, from the folder that `save` was given."""

    def state_moved(self, folder: Path) -> None:
        """Note that the state which was saved last is now in this folder."""


class PolicyEngine:
    """An implementation of `lightning.engines.protocol.Engine` for several policies. A row belongs to `Sample.policy`.

    `policies` are the trained policies by name. `make` makes the engine of one policy from the configuration, in which
    `engine.lora` is that policy's, or None. Raises `ConfigError` if that engine cannot share its base model.
    """

    sender: Callable[[], object]
    """See `SendsWeights`; only of engines that implement it."""

    def __init__(self, policies: Mapping[str, TrainedPolicy], make: Callable[[Config], Engine], config: Config) -> None:
        if not policies:
            raise ConfigError("no policy is trained: leave `train = false` out of at least one of [policies]")
        if EXPORTED in policies:
            raise ConfigError(f"no policy may have the name {EXPORTED!r}: a folder of the exported model has that name")
        self._policies = {name: policies[name] for name in sorted(policies)}
        self._engines: dict[str, AdapterEngine] = {}
        for name, policy in self._policies.items():
            section = config.engine.model_copy(update={"lora": policy.lora})
            engine = make(config.model_copy(update={"engine": section}))
            if not isinstance(engine, AdapterEngine):
                raise ConfigError(
                    f"the engine {type(engine).__name__} trains one policy, and not the policies of [policies] "
                    f"({', '.join(self._policies)}) on one base model: several policies need engine = torch or verl"
                )
            self._engines[name] = engine
        if isinstance(first := next(iter(self._engines.values())), SendsWeights):
            self.sender = first.sender  # of this object alone: the weights of other engines are in this process
        self._lr = OptimizerConfig().lr
        self.rates: dict[str, float] = {}
        """Learning rates that were set for policies; see `TrainsPolicies`."""
        self._pending: dict[str, StepResult] = {}
        """The report of each policy's accumulated gradient, which `forward_backward` made."""
        self._half = ""
        """The work that was done for some policies only, for messages; empty if there is none."""

    def check(self, model: Path) -> str:
        """Return the limits of training this folder, and those that policies begin as, in words, or raise (`ChecksModel`).
        Raises `ConfigError` if the adapters of a policy could not be given to vLLM alone, or if a base does not exist."""
        remarks, folders = [], self._folders(model)
        for name, engine in self._engines.items():
            base, lora = folders[self._policies[name].base], self._policies[name].lora
            with _of_policy(name):
                remarks.append(engine.check(base) if isinstance(engine, ChecksModel) else "")
                if lora is None:
                    continue
                adapted = read_model(base, device_map="meta")
                add_adapters(adapted, lora)
                if write_adapters(base, adapted, torch.float32, base, wanted=False) is None:
                    raise ConfigError(f"{NOT_ALONE} ({base})")
        whole = [name for name, policy in self._policies.items() if policy.lora is None]
        if len({self._policies[name].base for name in whole}) < len(whole):
            remarks.append(
                f"all weights of the policies {', '.join(whole)} are trained, so that each has a vLLM of its own and a model "
                "in the trainer's memory; with adapters (engine.lora) policies share those of one base."
            )
        return " ".join(filter(None, dict.fromkeys(remarks)))

    def check_loss(self, model: Path, loss: Loss) -> None:
        """Raise `ConfigError` for a loss that some policy's model cannot give what it needs (`ChecksLoss`)."""
        folders = self._folders(model)
        for name, engine in self._engines.items():
            with _of_policy(name):
                check_loss(engine, folders[self._policies[name].base], loss)

    def check_teacher(self, teacher: Path) -> None:
        """Raise if a folder cannot be the reference model (`ChecksTeacher`)."""
        engine = next(iter(self._engines.values()))
        if isinstance(engine, ChecksTeacher):
            engine.check_teacher(teacher)

    def open(
        self,
        model: Path,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        head: Head | None = None,
        reference: Path | None = None,
    ) -> None:
        """Load each base model of adapters once, and the model of each policy of which all weights are trained. Make the
        adapters, the optimizer and the head of each policy. Each policy's random numbers depend on `seed` and its name, so
        another policy in the run changes nothing."""
        folders = self._folders(model)
        for (base, _), names in self._models().items():
            first, *others = (
                (
                    self._engines[name],
                    Opening(replace(optimizer, lr=self._policies[name].lr or optimizer.lr), seed_of(seed, name), head),
                )
                for name in names
            )
            with _of_policy(*names):
                first[0].open_sharing(folders[base], first[1], others, reference=reference)
        self._lr, self._pending, self._half = optimizer.lr, {}, ""

    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the logprobs of each row under its policy, shape (T,) each; index 0 is NaN."""
        return self._routed(samples, lambda engine, own: engine.logprobs(own))

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the value of each call's state by the head of the row's policy, shape (spans,) for each row."""
        return self._routed(samples, lambda engine, own: engine.values(own))

    def step(self, samples: Sequence[Sample], loss: Loss, lr: float | None = None) -> StepResult:
        """Take a step of every policy that has rows, one policy after the other in the order of names.

        The rate of a policy is `lr` times the policy's own rate, divided by the run's. An update that is not finite is skipped
        for its policy alone (`skipped_nonfinite`), and each policy counts its skipped updates in a row; `stepped` is 1 if any
        policy was updated. Raises, before any policy is updated, `DataError` for a row of a policy that is not trained, and
        `ConfigError` for rows of several policies with a loss that compares rows (`StepLoss`, `whole_step`).
        """
        places, found, self._pending = self._places(samples, loss), dict[str, StepResult](), {}
        with self._whole("a step was taken", found):
            for name, own in places.items():
                with _of_policy(name):
                    found[name] = self._engines[name].step(_at(samples, own), loss, self._rate(name, lr))
        return merged(found, self._lr if lr is None else lr, each=bool(samples))

    def forward_backward(self, samples: Sequence[Sample], loss: Loss) -> StepResult:
        """Add the gradient of these rows to the gradients of their policies (`Engine.forward_backward`). If the
        computation fails, no policy has a gradient. Rows that `step` refuses are refused, too, and change nothing."""
        places, found = self._places(samples, loss), dict[str, StepResult]()
        try:
            for name, own in places.items():
                with _of_policy(name):
                    found[name] = self._engines[name].forward_backward(_at(samples, own), loss)
        except BaseException:
            self._pending = {}
            for engine in self._engines.values():
                engine.discard_gradient()
            raise
        found = self._pending | found
        self._pending = {name: found[name] for name in sorted(found) if "loss" in found[name].metrics}
        return merged(found, self._lr, each=bool(samples))

    def optim_step(self, lr: float | None = None) -> StepResult:
        """Update every policy that has a gradient, at the rates of `step`. A policy whose gradient is not finite is skipped,
        with a warning; if no gradient is finite, raises `NonFiniteError`. Raises `EngineError` without a gradient."""
        self._usable()
        names, self._pending = [*self._pending] or [*self._engines][:1], {}
        found: dict[str, StepResult] = {}
        skipped: list[NonFiniteError] = []
        with self._whole("an update was taken", found):
            for name in names:
                try:
                    found[name] = self._engines[name].optim_step(self._rate(name, lr))
                except NonFiniteError as error:
                    logger.warning("the update of the policy %s is skipped: %s", name, error)
                    found[name] = StepResult({"skipped_nonfinite": 1.0, "updates": 0.0, "stepped": 0.0}, {})
                    skipped.append(error)
        if len(skipped) == len(names):
            raise skipped[0]
        return merged(found, self._lr if lr is None else lr, each=True)

    def save(self, folder: Path) -> None:
        """Write the training state of each policy to `folder`/NAME, all of them atomically."""
        self._usable()
        with whole_folder(folder) as path:
            for name, engine in self._engines.items():
                engine.save(path / name)  # all have the same random state, because saving draws no random number
        for name, engine in self._engines.items():
            if isinstance(engine, RevivesFromState):
                engine.state_moved(folder / name)

    def load(self, folder: Path) -> None:
        """Restore the training state of each policy. Raises `EngineError`, before anything is changed, if the state does not
        have the same policies."""
        recover(folder)
        saved = {path.name for path in folder.glob("*") if path.is_dir() and not path.name.startswith(".")}
        missing, more = sorted(self._engines.keys() - saved), sorted(saved - self._engines.keys())
        if missing or more:
            told = [f"has no policy {', '.join(missing)}"] * bool(missing)
            told += [f"also has the policy {', '.join(more)}"] * bool(more)
            raise EngineError(
                f"the training state in {folder} {' and '.join(told)}: resume with the [policies] that the run was started with"
            )
        self._half, self._pending = f"the training state in {folder} was loaded in part", {}
        for name, engine in self._engines.items():
            with _of_policy(name):
                engine.load(folder / name)
        self._half = ""

    def export(self, folder: Path) -> Path:
        """Write, atomically, for each policy `folder`/NAME, a model folder with its adapters merged, and of adapters
        `folder`/adapters/NAME, the adapters alone as a folder of PEFT. If all policies are adapters of one base model, write
        the file of `adapters` as `ADAPTERS_OF_ALL`, too. Return `folder`."""
        self._usable()
        with whole_folder(folder) as path, TemporaryDirectory(dir=path) as scratch:
            for name, engine in self._engines.items():
                engine.export(path / name)
                if (lora := self._policies[name].lora) is not None:
                    write_peft_folder(path / EXPORTED / name, self._written(name, Path(scratch) / name), lora)
            if self._share_a_base:
                self.adapters(path / ADAPTERS_OF_ALL)
        return folder

    def export_policy(self, policy: str, folder: Path) -> Path:
        """Write, atomically, the model folder of one policy, with its adapters merged, and return it."""
        self._usable()
        return self._engines[policy].export(folder)

    def weights(self, file: Path) -> Path:
        """Raise `EngineError`: several policies are no one model."""
        raise EngineError(
            f"{file} would be the weights of one model, and there are the policies {', '.join(self._engines)}: let lightning "
            "start their vLLMs (without policy_server.attach), with policy_server.weight_transfer = auto, shared_memory or "
            "file, which take several"
        )

    def adapters(self, file: Path) -> Path:
        """Write the weights of all policies for their vLLMs, and return where they are. If all policies are adapters of one
        base model, that is one safetensors file, written atomically.

        The names of the file's tensors are those of `WritesAdapters` with `NAME|` before them, and its metadata are `POLICIES`.
        Otherwise a folder beside `file` has such a file for each base model with adapters, and a file with all weights for each
        other policy (`transfer.part_of`).
        """
        self._usable()
        if self._share_a_base:
            return self._combined([*self._policies], file)
        folder = file.with_suffix("")
        for (_, whole), names in self._models().items():
            part = folder / part_of(names)
            if whole:
                self._engines[whole].weights(part)
            else:
                self._combined(names, part)
        return folder

    def _models(self) -> dict[tuple[str | None, str], list[str]]:
        """Return the policies of each model in memory: all that have adapters on a base, ("" in the key), and each one of which
        all weights are trained."""
        found: dict[tuple[str | None, str], list[str]] = {}
        for name, policy in self._policies.items():
            found.setdefault((policy.base, "" if policy.lora else name), []).append(name)
        return found

    @property
    def _share_a_base(self) -> bool:
        """Whether all policies are adapters of one base model."""
        return [whole for _, whole in self._models()] == [""]

    def _combined(self, names: Sequence[str], file: Path) -> Path:
        """Write the adapters of policies with one base model as one safetensors file, atomically, and return it."""
        tensors: dict[str, torch.Tensor] = {}
        told: dict[str, Json] = {}
        with whole_file(file) as path, TemporaryDirectory(dir=path.parent, prefix=".policies-") as scratch:
            for name in names:
                own, about = read_adapters(self._written(name, Path(scratch) / name))
                tensors |= {f"{name}|{key}": tensor for key, tensor in own.items()}
                told[name] = about
            save_file(tensors, path, metadata={"format": "pt", POLICIES: json.dumps(told)})
        return file

    def numerics(self) -> dict[str, Json]:
        """Return the numerics (`trainer.context.Numeric`) that all policies have in common. A number in which they differ is
        returned by policy."""
        found = {name: engine.numerics() for name, engine in self._engines.items() if isinstance(engine, Numeric)}
        common: dict[str, Json] = {}
        for key in dict.fromkeys(key for numbers in found.values() for key in numbers):
            own = {name: numbers.get(key) for name, numbers in found.items()}
            first, *others = own.values()
            common[key] = first if all(other == first for other in others) else own
        return common

    def close(self) -> None:
        """Free the memory of all policies, and of the base model. Further calls do nothing."""
        self._pending = {}
        for engine in self._engines.values():
            engine.close()

    def _places(self, samples: Sequence[Sample], loss: Loss | None = None) -> dict[str, list[int]]:
        """Return the indices of each policy's rows, in the order of the policies' names. Without any row, the first policy has
        none. Raises the errors of `step`."""
        self._usable()
        for sample in samples:
            if sample.policy not in self._engines:
                raise DataError(
                    f"the row of {row_name(sample)} belongs to the policy {sample.policy!r}, and the engine trains "
                    f"{', '.join(self._engines)} alone: leave the calls of other policies out of the rows (train_agents)"
                )
        found = {
            name: [place for place, sample in enumerate(samples) if sample.policy == name] for name in self._engines
        }
        having = {name: places for name, places in found.items() if places}
        if len(having) > 1 and getattr(loss, "whole_step", False):
            turns = ",".join(f"{name}:1" for name in having)
            raise ConfigError(
                f"{type(loss).__name__} compares rollouts over all rows of a step, and each policy learns from its own rows "
                f"alone: let the policies take turns (trainer.policy_turns = {turns!r}), or take another algorithm"
            )
        return having or {next(iter(found)): []}

    def _routed(
        self, samples: Sequence[Sample], compute: Callable[[Engine, Sequence[Sample]], list[FloatArray]]
    ) -> list[FloatArray]:
        """Return the results of `compute` for each policy's rows, in the order of `samples`."""
        found: dict[int, FloatArray] = {}
        for name, places in self._places(samples).items():
            found |= zip(places, compute(self._engines[name], _at(samples, places)), strict=True)
        return [found[place] for place in range(len(samples))]

    def _folders(self, model: Path) -> dict[str | None, Path]:
        """Return the folder of each policy's base. Raises `ConfigError` for a base that does not exist."""
        return folders_of([policy.base for policy in self._policies.values()], model)

    def rate_of(self, policy: str, lr: float) -> float:
        """Return the learning rate of a policy in a step for which the run has the rate `lr`."""
        own = self._policies[policy].lr
        return lr if own is None else lr * (own / self._lr)

    def _rate(self, name: str, lr: float | None) -> float | None:
        return self.rates.get(name, None if lr is None else self.rate_of(name, lr))

    @contextmanager
    def _whole(self, doing: str, found: Mapping[str, StepResult]) -> Iterator[None]:
        """Note an error inside the block after the weights of some policies were changed, by the reports `found`."""
        try:
            yield
        except BaseException as error:
            if changed := [name for name, report in found.items() if report.metrics.get("stepped", 1.0)]:
                self._half = f"{doing} for {', '.join(changed)} and then failed ({error})"
            raise

    def _usable(self) -> None:
        if self._half:
            raise EngineError(f"{self._half}, so the policies do not belong together: resume the run")

    def _written(self, name: str, file: Path) -> Path:
        with _of_policy(name):
            if self._engines[name].adapters(file) is None:
                raise EngineError(NOT_ALONE)
        return file


@contextmanager
def _of_policy(*names: str) -> Iterator[None]:
    """Name one policy or several, and the policies' own settings, in an error inside the block."""
    try:
        yield
    except (ConfigError, EngineError) as error:
        told = str(error).replace("engine.lora", f"policies.{names[0] if len(names) == 1 else 'NAME'}.lora")
        raise type(error)(f"the polic{'ies' if names[1:] else 'y'} {', '.join(names)}: {told}") from error


def seed_of(seed: int, policy: str) -> int:
    """Return the seed of a policy's random numbers in a run with this `seed`."""
    return int.from_bytes(hashlib.sha256(f"{seed} {policy}".encode()).digest()[:4], "big")


def merged(reports: Mapping[str, StepResult], lr: float, *, each: bool) -> StepResult:
    """Return one report from those of the policies, in which `lr` is the rate of the run if an update was taken.

    `COUNTS` are added up, of `MAXIMA` the largest is taken, norms of gradients become the norm of all gradients together, and
    other metrics are means weighted by trained tokens (gaps: by compared tokens). A metric without a measurement stays absent.
    With `each`, `TOLD` of every policy are reported too; `gradient_share` is the policy's share of the squared norm of all
    gradients before clipping.
    """
    metrics: dict[str, float] = {}
    for key in dict.fromkeys(key for report in reports.values() for key in report.metrics):
        having = {name: report for name, report in reports.items() if key in report.metrics}
        metrics[key] = lr if key == "lr" else _of_all(key, [report.metrics for report in having.values()])
    squares = {
        name: report.metrics["grad_norm"] ** 2 for name, report in reports.items() if "grad_norm" in report.metrics
    }
    whole = sum(squares.values())
    for name, report in reports.items() if each else ():
        share = {"gradient_share": squares[name] / whole} if whole and name in squares else {}
        own = {**report.metrics, **share}
        metrics |= {f"policy/{name}/{key}": own[key] for key in TOLD if key in own}
    return StepResult(metrics, {span: digest for report in reports.values() for span, digest in report.seen.items()})


def _of_all(key: str, reports: Sequence[Mapping[str, float]]) -> float:
    """Return a metric of all policies from the metrics of those that have it."""
    values = [metrics[key] for metrics in reports]
    if len(values) == 1:
        return values[0]
    if key in COUNTS:
        return sum(values)
    if key in MAXIMA or key.endswith("_max"):
        return max(values)
    if key.endswith("grad_norm"):
        return math.hypot(*values)
    weights = [metrics.get("tokens_compared" if key == "mean_logprob_gap" else "tokens", 0.0) for metrics in reports]
    total = sum(weights)
    if not total:
        return math.fsum(values) / len(values)
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def read_adapters(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Json]]:
    """Return the tensors of a file that `WritesAdapters.adapters` wrote, and its metadata `ADAPTERS`."""
    with safe_open(file, framework="pt", device="cpu") as handle:
        told: dict[str, Json] = json.loads(handle.metadata()[ADAPTERS])
        return {name: handle.get_tensor(name) for name in handle.keys()}, told  # noqa: SIM118 — a handle is no mapping


def write_peft_folder(folder: Path, adapters: Path, lora: LoraConfig) -> Path:
    """Write the adapters of a file that `WritesAdapters.adapters` wrote as a folder that PEFT and vLLM load, and return it."""
    import peft

    tensors, told = read_adapters(adapters)
    suffixes = {LORA_A: ".lora_A.weight", LORA_B: ".lora_B.weight"}
    named: dict[str, torch.Tensor] = {}
    modules = set[str]()
    for name, tensor in tensors.items():
        module, kind = name[: name.rindex("|")].removesuffix(".weight"), name[name.rindex("|") :]
        modules.add(module.rpartition(".")[2])
        named[f"{WRAPPER}{module}{suffixes[kind]}"] = tensor
    config = peft.LoraConfig(
        base_model_name_or_path=str(told["base"]),
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(modules) if lora.target_modules == "all-linear" else [*lora.target_modules],
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def _at(samples: Sequence[Sample], places: Sequence[int]) -> list[Sample]:
    return [samples[place] for place in places]

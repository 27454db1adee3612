"""How the weights of several policies come into their vLLMs: the arguments of each start, and every exchange afterwards.

The invariant: an untrained policy answers as before, bit for bit, however often other policies are trained. Where adapters are
trained, the weights of the base model never change: vLLM has an adapter for each trained policy, in the order of their names,
and calls of a policy carry the name of its adapter. A policy of which all weights are trained is alone in its vLLM. A vLLM
loads its own part of new weights alone.
"""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from lightning.config import LoraConfig
from lightning.errors import ConfigError, PolicyServerError, import_extra
from lightning.policy_server.model_folder import (
    LORA_A,
    LORA_B,
    POLICIES,
    checkpoint_files,
    folder_tensors,
    read_metadata,
)
from lightning.policy_server.weights import FromDisk, WeightTransfer

if TYPE_CHECKING:
    from lightning.policy_server.auto_settings import Device
    from lightning.policy_server.control import VLLMControl

EXTENSION = "lightning_policies.worker.PolicyWorker"
"""The worker extension that vLLM must be started with, instead of the core's."""
CURES = (
    ("does not support LoRA", "Adapters of several policies need a model of another kind: train one policy"),
    (
        "expected target modules in .* but received",
        "Name modules that vLLM has for the adapters (engine.lora.target_modules)",
    ),
    (
        "When using LoRA, vocab size",
        "Name the modules for the adapters (engine.lora.target_modules) instead of all-linear",
    ),
)
"""Errors of vLLM with adapters; see `WeightTransfer.cures`."""
_MATRIX = re.compile(r"\.\d+\.(?!.*experts).*\.weight$")
"""Matches the names of weights in a numbered layer, except those of experts, which vLLM keeps together."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `--max-lora-rank`."""


class PolicyPart:
    """Implements `WeightTransfer` for one of several vLLMs of a run. Weights are a folder with a file for each of these vLLMs
    that has `trained` policies; the file has the first one's name. A vLLM that has none loads nothing.

    `inner` is the way of that file into vLLM: of adapters, or of all weights of the one trained policy. `untrained` are the
    names of the other policies that this vLLM answers. Raises `ConfigError` if `inner` does not read files.
    """

    def __init__(self, inner: WeightTransfer, trained: Sequence[str], untrained: Sequence[str]) -> None:
        if not isinstance(inner, PolicyAdapters):
            _check_reads_files(inner)
        self.extension, self.cures = inner.extension, inner.cures
        self._inner, self._part, self._policies = inner, part_of(trained) if trained else "", (*trained, *untrained)

    def args(self, alias: str) -> Sequence[str]:
        """Return the arguments that vLLM needs for its own part."""
        return self._inner.args(alias)

    def models(self, alias: str) -> Sequence[tuple[str, str]]:
        """Return the model name of each policy: that of its adapter, or `alias`."""
        return self._inner.models(alias) or [(name, alias) for name in self._policies]

    def part(self, weights: Path) -> Path | None:
        """Return the file of this vLLM; None if no policy that it answers is trained. Raises `PolicyServerError` for weights
        without it."""
        if not self._part:
            return None
        if not (file := weights / self._part).is_file():
            raise PolicyServerError(f"{weights} has no weights of the policy {Path(self._part).stem!r} ({self._part})")
        return file

    def check(self, device: Device | None) -> None:
        """Raise `ConfigError` for a vLLM that somebody else runs (None), and for what `inner` refuses."""
        _check_is_ours(device)
        self._inner.check(device)

    async def ready(self, control: VLLMControl) -> None:
        """Do nothing: files need no preparation."""

    async def load(self, control: VLLMControl, files: Sequence[Path]) -> None:
        """Have vLLM load the files of its part."""
        await self._inner.load(control, files)


class PolicyAdapters:
    """Implements `WeightTransfer` for the adapters of several policies. Weights are one file with the adapters of all trained
    policies (`model_folder.POLICIES`).

    `trained` has the adapters of each trained policy by its name, and `untrained` are the names of the policies that the base
    model in the folder `model` answers. Raises `ConfigError` if `transfer`, the way for whole weights, does not read files, and
    for adapters of a rank that vLLM does not take.
    """

    extension = EXTENSION
    cures: Sequence[tuple[str, str]] = CURES

    def __init__(
        self, transfer: WeightTransfer, model: Path, trained: Mapping[str, LoraConfig], untrained: Sequence[str]
    ) -> None:
        _check_reads_files(transfer)
        for name, lora in trained.items():
            if lora.rank > RANKS[-1]:
                raise ConfigError(
                    f"the adapters of the policy {name!r} have rank {lora.rank}, and vLLM takes {RANKS[-1]} at most: lower the "
                    f"rank (policies.{name}.lora.rank, or engine.lora.rank)"
                )
        self._model, self._untrained = model.resolve(), tuple(untrained)
        self._trained = {name: trained[name] for name in sorted(trained)}
        self._folder: Path | None = None

    def args(self, alias: str) -> Sequence[str]:
        """Return the arguments with which vLLM has an adapter for each trained policy. The adapters of the start change
        nothing: their folders, which are removed with this object, have zeros alone."""
        rank = next(rank for rank in RANKS if rank >= max(lora.rank for lora in self._trained.values()))
        count, targets = str(len(self._trained)), _targets(self._trained.values())
        args = ["--enable-lora", "--max-loras", count, "--max-cpu-loras", count, "--max-lora-rank", str(rank)]
        args += ["--lora-target-modules", *targets] if targets else []
        names = dict(self.models(alias))
        return [
            *args,
            "--lora-modules",
            *(json.dumps({"name": names[name], "path": str(self._start_of(name))}) for name in self._trained),
        ]

    def models(self, alias: str) -> Sequence[tuple[str, str]]:
        """Return `ALIAS/NAME` for each trained policy, which is the name of its adapter, and `alias` for each other policy."""
        return [
            *((name, f"{alias}/{name}") for name in self._trained),
            *((name, alias) for name in self._untrained),
        ]

    def part(self, weights: Path) -> Path | None:
        """Return all of the weights."""
        return weights

    def check(self, device: Device | None) -> None:
        """Raise `ConfigError` for a model without a layer for the adapters, and for a vLLM that somebody else runs (None): it
        was not started for these policies."""
        _check_is_ours(device)
        self._matrix()

    async def ready(self, control: VLLMControl) -> None:
        """Do nothing: files need no preparation."""

    async def load(self, control: VLLMControl, files: Sequence[Path]) -> None:
        """Have vLLM replace all adapters by those of a file. The files of the base model stand for adapters that change
        nothing.

        Raises `PolicyServerError` for other files without exchanging anything: they would change the base model.
        """
        if list(files) == checkpoint_files(self._model):
            files = [self._untrained_file()]
        elif len(files) != 1 or POLICIES not in read_metadata(files[0]):
            raise PolicyServerError(
                f"{', '.join(map(str, files))} has no adapters of several policies, and other weights would change the base "
                "model for all policies"
            )
        await control.load(files)

    def _place(self) -> Path:
        """Return the folder for the files of this object, which is removed with it."""
        if self._folder is None:
            self._folder = Path(mkdtemp(prefix="lightning-policies-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def _start_of(self, name: str) -> Path:
        """Return the folder, in the format of peft, of a policy's adapter at the start, made at the first call.

        Beside the one matrix that an adapter needs it has one for each module that the settings name: vLLM refuses names that
        it does not know.
        """
        folder, targets = self._place() / name, _targets([self._trained[name]])
        if not folder.is_dir():
            modules = [self._matrix().removesuffix(".weight"), *targets]
            tensors = [
                f"base_model.model.{module}.{part}.weight" for module in modules for part in ("lora_A", "lora_B")
            ]
            told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "target_modules": targets}
            folder.mkdir()
            (folder / "adapter_config.json").write_text(json.dumps(told))
            _save_zeros(folder / "adapter_model.safetensors", tensors, {"format": "pt"})
        return folder

    def _untrained_file(self) -> Path:
        """Return a file of adapters that change nothing, made at the first call."""
        file, matrix = self._place() / "untrained.safetensors", self._matrix()
        if not file.is_file():
            tensors = [f"{name}|{matrix}{part}" for name in self._trained for part in (LORA_A, LORA_B)]
            told = {name: {"scaling": {matrix: 1.0}} for name in self._trained}
            _save_zeros(file, tensors, {POLICIES: json.dumps(told)})
        return file

    def _matrix(self) -> str:
        """Return the name of a matrix of the model that may get an adapter."""
        targets = _targets(self._trained.values())
        for name, spec in sorted(folder_tensors(self._model).items()):
            module = name.removesuffix(".weight").rpartition(".")[2]
            if len(spec.shape) == 2 and _MATRIX.search(name) and (not targets or module in targets):
                return name
        raise ConfigError(
            f"the model in {self._model} has no layer for an adapter: name other modules in engine.lora.target_modules, or in "
            f"policies.NAME.lora.target_modules ({', '.join(targets) or 'all-linear'})"
        )


def part_of(trained: Iterable[str]) -> str:
    """Return the name of the file with the weights of the trained policies of one vLLM."""
    return f"{min(trained)}.safetensors"


def _check_reads_files(transfer: WeightTransfer) -> None:
    if not isinstance(transfer, FromDisk):
        raise ConfigError(
            "weights of several policies come into vLLM as files, and policy_server.weight_transfer sends whole weights "
            'otherwise: set it to "auto", "shared_memory" or "file"'
        )


def _check_is_ours(device: Device | None) -> None:
    if device is None:
        raise ConfigError(
            "policy_server.attach names a vLLM that was not started for the policies of this run: leave it out, so that one is "
            "started for them, or train one policy, without [policies]"
        )


def _targets(loras: Iterable[LoraConfig]) -> list[str]:
    """Return the last parts of the names of all modules that get an adapter; empty where some adapters are on all linear
    layers."""
    found: set[str] = set()
    for lora in loras:
        if isinstance(lora.target_modules, str):
            return []
        found |= {target.rpartition(".")[2] for target in lora.target_modules}
    return sorted(found)


def _save_zeros(file: Path, names: Iterable[str], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file in which each tensor is one zero: vLLM fills the rest of a matrix with zeros."""
    import numpy as np

    zero = np.zeros((1, 1), np.float32)
    import_extra("torch", "safetensors.numpy").save_file(dict.fromkeys(names, zero), file, metadata=dict(metadata))

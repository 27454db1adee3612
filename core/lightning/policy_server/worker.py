"""The extension of vLLM's worker: loads weights in place, and tells how many tokens each request has.

The invariant: after `lightning_load` the model computes with exactly the tensors of the file, also where vLLM keeps its own
repacked copies, or the answer says what went wrong. Only the trainer that left the last claim can load. An exception never
leaves this class: vLLM passes one on at once and keeps the other workers' answers queued, which it then takes for those of
later calls.

vLLM mixes the class into its worker (`--worker-extension-cls`) and lets `/collective_rpc` call its methods; arguments are
strings. vLLM does one call after another, on every worker in the same order: so all workers know one claim, and of two trainers
one comes second. Written for vLLM 0.27 to 0.32, whose reload helpers and request states were compared in source; 0.31 on a CPU
is tested, every CUDA path, tensor parallelism and the V2 model runner are not.

The extension also corrects calls with a seed on a CPU: their samples do not depend on how the prompt was cut into parts, and
none ends the engine. vLLM draws a token also for a part of a prompt, throws it away, and turns the call's generator back by an
offset that only CUDA's generators have: on a CPU that raises `CPU Generator does not use offset`, and the engine is gone with
every call in it. Here the generator gets back the state that it had before the draw.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeAlias

from lightning.bounded import Bounded
from lightning.policy_server.gathering import Gathering
from lightning.policy_server.launch import OWNED, PARTS, die_with_parent
from lightning.policy_server.model_folder import weight_tensors

if TYPE_CHECKING:
    import torch


Answer: TypeAlias = "dict[str, object]"
P = ParamSpec("P")

if os.environ.get(OWNED):
    # vLLM imports this module in its engine process before the model is loaded: the earliest moment there is.
    die_with_parent()


@dataclass(slots=True)
class State:
    """What the extension knows of its worker."""

    departed: Bounded[str, int]
    """Response tokens of each request that left the engine since the last update, newest last."""
    version: int | None = 0
    """The version of the weights. None while they are loaded, and afterwards until a version is set."""
    unwatched: str = ""
    """Why the tokens of some departed requests are unknown; empty if all are known."""
    claim: str = ""
    """The word of the trainer that attached last, by which its gateways know this vLLM; empty if no trainer owns it."""
    requests: int = 0
    """Requests begun since this worker was first called, with `prompt_tokens` in all, of which `cached_tokens` lay in the
    prefix cache."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    """How often a request lost its place in the KV cache to others, to be computed again."""


USAGE = ("requests", "prompt_tokens", "cached_tokens", "preemptions")
"""The fields of `State` that are counts."""


def told(method: Callable[P, Answer]) -> Callable[P, Answer]:
    """Decorate a method so that an exception becomes its answer, under `error`."""

    @wraps(method)
    def answer(*args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 — see the module's invariant
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


class WorkerExtension:
    """Methods for `/collective_rpc`. All names start with `lightning_`: vLLM refuses a name its worker has already."""

    _lightning_state: State
    _LIGHTNING_STATE: ClassVar[type[State]] = State
    _LIGHTNING_REMEMBERED: ClassVar[int] = 8192
    """How many departed requests are remembered: more than can be on their way from the engine to their clients at one time."""

    @told
    def lightning_attach(self) -> Answer:
        """Watch the requests from the first call on. Return the version of the weights (None: unknown), our process id, the
        claim, and the counts of `Usage` since then."""
        state = self._lightning_known()
        usage = {name: getattr(state, name) for name in USAGE}
        return {"version": state.version, "pid": os.getpid(), "claim": state.claim, **usage}

    @told
    def lightning_claim(self, claim: str, *over: str) -> Answer:
        """Make a trainer the owner of the weights, whose loads alone are accepted; an empty claim means no owner.

        With `over`, only if there is no claim or the claim is one of these. Return the former claim, and the version at that
        time.
        """
        state = self._lightning_known()
        before = state.claim
        if over and before not in ("", *over):
            return {"owner": before}
        state.claim = claim
        return {"version": state.version, "before": before}

    @told
    def lightning_set_version(self, claim: str, version: str) -> Answer:
        """Declare the weights as `version`, and forget the requests that left the engine before."""
        state = self._lightning_known()
        if state.claim != claim:
            return {"owner": state.claim}
        state.version = int(version)
        state.departed.clear()
        state.unwatched = ""
        return {"version": state.version}

    @told
    def lightning_in_flight(self) -> Answer:
        """Return the response tokens sampled so far, by the engine's request id, for every request that was ever scheduled.

        A request may have finished while its answer is still on the way to the client, so requests that left since the last
        update are included. An absent request was never scheduled. Call it while the engine is paused.
        """
        state = self._lightning_known()
        counts = {**state.departed, **_sampled(_runner(self))}
        if state.unwatched:
            return {"error": f"requests that ended were not counted: {state.unwatched}"}
        return {"counts": counts, "randomized": not _ids_are_plain()}

    @told
    def lightning_load(self, claim: str, *paths: str) -> Answer:
        """Load safetensors files in place. Call it while the engine is paused; the version is unknown afterwards."""
        state = self._lightning_known()
        if state.claim != claim:
            return {"owner": state.claim}
        started = time.perf_counter()
        self._lightning_void()
        self._lightning_replace(paths)
        return {"seconds": time.perf_counter() - started}

    def _lightning_replace(self, paths: Sequence[str]) -> None:
        """Replace the model's weights by those of the files."""
        _load(self, paths)

    def _lightning_known(self) -> State:
        """Return the state of this worker. The first call starts to watch its requests, makes seeds work on a CPU, and lets
        plugins add their parts."""
        state = getattr(self, "_lightning_state", None)
        if state is None:
            state = self._lightning_state = self._LIGHTNING_STATE(Bounded(self._LIGHTNING_REMEMBERED))
            _watch(self, state)
            keep_seeds(_runner(self))
            for part in filter(None, os.environ.get(PARTS, "").split(",")):
                resolve_name(part)(_runner(self))
        return state

    def _lightning_void(self) -> None:
        """Mark the weights as those of no version."""
        self._lightning_known().version = None


def _runner(worker: object) -> object:
    return getattr(worker, "model_runner")  # noqa: B009 — vLLM's worker, which has no type here


def _ids_are_plain() -> bool:
    return os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0").strip().lower() in ("1", "true")


def _watch(worker: object, state: State) -> None:
    """Note each request's length when the scheduler says that it has left, and count new requests and their cached tokens.

    The method is wrapped on the worker itself: a mixin stands behind vLLM's own class and cannot override it.
    """
    execute: Callable[..., object] = getattr(worker, "execute_model")  # noqa: B009
    gathering = Gathering.of()

    def execute_model(scheduler_output: object, *args: object, **kwargs: object) -> object:
        leaving: set[str] = set(getattr(scheduler_output, "finished_req_ids", ()))
        preempted: set[str] = set(getattr(scheduler_output, "preempted_req_ids", None) or ())
        leaving |= preempted
        state.preemptions += len(preempted)
        for begun in getattr(scheduler_output, "scheduled_new_reqs", ()):
            state.requests += 1
            state.prompt_tokens += len(getattr(begun, "prompt_token_ids", None) or ())
            state.cached_tokens += int(getattr(begun, "num_computed_tokens", 0))
        if leaving:
            try:
                counts = _sampled(_runner(worker), leaving)
            except Exception as error:  # noqa: BLE001 — would end the engine; `lightning_in_flight` reports it
                counts, state.unwatched = {}, repr(error)
            for request_id, count in counts.items():
                state.departed.keep(request_id, count)
        if gathering is not None:
            gathering.wait(len(getattr(scheduler_output, "num_scheduled_tokens", ())))
        return execute(scheduler_output, *args, **kwargs)

    setattr(worker, "execute_model", execute_model)  # noqa: B010


def _sampled(runner: object, only: set[str] | None = None) -> dict[str, int]:
    """Return the response tokens of the model runner's requests, or of those in `only`."""
    requests = getattr(runner, "requests", None)
    if isinstance(requests, dict):  # the V1 model runner: CachedRequestState
        return {rid: len(requests[rid].output_token_ids) for rid in _pick(requests, only)}
    states = getattr(runner, "req_states", None)
    if states is None:
        raise RuntimeError(f"lightning does not know the request states of {type(runner).__name__}")
    indices: dict[str, int] = states.req_id_to_index  # the V2 model runner: rows of tensors
    rows = {rid: indices[rid] for rid in _pick(indices, only)}
    return {rid: int(states.total_len.gpu[row]) - int(states.prompt_len.np[row]) for rid, row in rows.items()}


def _pick(known: dict[str, object] | dict[str, int], only: set[str] | None) -> list[str]:
    return [rid for rid in known if only is None or rid in only]


def _load(worker: object, paths: Sequence[str]) -> None:
    """Replace the model's weights by those of the files."""
    from vllm.config import set_current_vllm_config

    model: torch.nn.Module = _runner(worker).get_model()  # type: ignore[attr-defined]
    with set_current_vllm_config(worker.vllm_config):  # type: ignore[attr-defined]
        replace_weights(model, worker.model_config, worker.device, weight_tensors(paths))  # type: ignore[attr-defined]


def replace_weights(
    model: torch.nn.Module, config: object, device: torch.device, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Replace a model's weights, in vLLM's worker. `config` is vLLM's configuration of the model.

    A part of the model without any new tensor, such as a vision tower, keeps its weights. Raises `RuntimeError` when a
    parameter of another part got none.
    """
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    # A tied output layer is counted here once, as the embedding; within a reload it is a tensor of its own.
    names = {name for name, _ in model.named_parameters()}
    with torch.no_grad(), ExitStack() as last:
        if device.type == "cpu":
            last.enter_context(_new_expert_kernels(model))
        initialize_layerwise_reload(model)
        # Tensors that vLLM has derived from a file's, such as MLA's W_UV, are gone within a reload.
        names &= {name for name, _ in model.named_parameters()}
        # Also after a failure: this puts back the tensors of every layer that has not been loaded.
        last.callback(finalize_layerwise_reload, model, config)
        loaded = model.load_weights(tensors)  # type: ignore[operator]
    _repack(model)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    if loaded is not None and (left := _forgotten(names, set(loaded))):
        raise RuntimeError(f"there are no weights for {', '.join(left[:3])} ({len(left)} parameters in all)")


def _forgotten(names: set[str], loaded: set[str]) -> list[str]:
    """Return the parameters that got no weights although others of their part did; the output layer belongs to every part. vLLM
    0.31 reports the experts' parameters by the layer's name, though they are in a module of its own."""
    names = {name for name in names if name.replace(".routed_experts.", ".") not in loaded}
    parts = {name.partition(".")[0] for name in loaded} | {"lm_head"}
    return sorted(name for name in names - loaded if name.partition(".")[0] in parts)


@contextmanager
def _new_expert_kernels(model: torch.nn.Module) -> Iterator[None]:
    """Within the block, make vLLM build a new kernel for the experts of each layer that is loaded.

    vLLM 0.31 packs experts for a CPU only when it makes their kernel, once (`UnquantizedFusedMoEMethod._setup_kernel`); a
    reload would put unpacked weights where packed ones are read.
    """
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    kernels = [(method, kernel) for method in methods if (kernel := getattr(method, "moe_kernel", None)) is not None]
    for method, _ in kernels:
        method.moe_kernel = None  # type: ignore[union-attr]
    try:
        yield
    finally:
        for method, kernel in kernels:
            if method.moe_kernel is None:  # type: ignore[union-attr]
                method.moe_kernel = kernel  # type: ignore[union-attr]


def _repack(model: torch.nn.Module) -> None:
    """Renew the repacked copies that vLLM's CPU kernels compute with.

    The reload helpers renew those of the layers they load. A tied `lm_head` has no weights of its own, is not loaded, and would
    go on answering with the old copy. Where the weight has been given away to the copy (`numel() == 0`) the helpers have
    renewed it.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        if method is None or weight is None or not hasattr(module, "cpu_linear"):
            continue
        if weight.numel() and not weight.is_meta:
            method.process_weights_after_loading(module)


def keep_seeds(runner: Any) -> None:
    """Wrap the model runner of a CPU so that generators are turned back correctly. A runner with other methods is left as it
    is."""
    wrappers = {"_sample": _turning_back, "_bookkeeping_sync": _without_generators}
    needed = (*wrappers, "input_batch", "discard_request_mask")
    if getattr(getattr(runner, "device", None), "type", "") == "cpu" and all(hasattr(runner, name) for name in needed):
        for name, wrapped in wrappers.items():
            setattr(runner, name, wrapped(runner, getattr(runner, name)))


def _turning_back(runner: Any, sample: Callable[..., object]) -> Callable[..., object]:
    """Return a `_sample` that restores each generator whose drawn token is thrown away."""

    @wraps(sample)
    def sampled(*args: object, **named: object) -> object:
        generators = runner.input_batch.generators
        if not generators:
            return sample(*args, **named)
        thrown_away = runner.discard_request_mask.np
        before = [(one, one.get_state()) for row, one in generators.items() if thrown_away[row]]
        output = sample(*args, **named)
        for one, state in before:
            one.set_state(state)
        return output

    return sampled


def _without_generators(runner: Any, bookkeeping: Callable[..., object]) -> Callable[..., object]:
    """Return a `_bookkeeping_sync` that sees no generators, so that it turns none back."""

    @wraps(bookkeeping)
    def kept(*args: object, **named: object) -> object:
        batch = runner.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return bookkeeping(*args, **named)
        finally:
            batch.generators = generators

    return kept

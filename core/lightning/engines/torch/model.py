"""A causal language model in two halves: the trunk that makes hidden states, and the output layer.

The invariant: trunk and output layer together give exactly the model's own logits, and a token's logprob depends on the tokens
before it alone; both are checked at loading. The reference model (by default the model that training began with) computes, also
in a resumed run, exactly as the trained model did before its first step, in the same dtype: it is loaded from the folder that
the engine was opened with, never from a training state.

Dtypes: `float32` computes and keeps everything in float32. `bfloat16` computes in bfloat16 under autocast, but keeps float32
master weights: at a learning rate of 1e-6 most updates would vanish in bfloat16's eight bits. Under LoRA the frozen weights are
bfloat16 and only the adapters are float32. `float64` is for tests.

Trained linear and embedding layers add their weights' gradients in place, with the results and gradients of `nn.Linear` and
`nn.Embedding`. Autograd would allocate a tensor as large as the weights for each backward pass and add it to the gradient; for
an embedding of 49,152 words that is 113 MB, for a few hundred tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import nn

from lightning.engines.loading import (
    add_adapters,
    base_of,
    beside_text,
    fix_positions,
    gradient_mode,
    read_model,
)
from lightning.engines.logprobs import Logits, outputs_of, same_output, trunk
from lightning.engines.sameness import refuse_dependence
from lightning.engines.step import needing_room
from lightning.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning.config import LoraConfig


def add_in_place(model: nn.Module) -> Casts:
    """Make a model's trained plain linear and embedding layers add up their weights' gradients in place. Returns the casts that
    the linear layers share."""
    casts = Casts()
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.requires_grad:
            module.__class__ = AddingLinear
            cast("AddingLinear", module).casts = casts
        elif type(module) is nn.Embedding and _is_plain(module):
            module.__class__ = AddingEmbedding
    return casts


def _is_plain(embedding: nn.Embedding) -> bool:
    """Whether an embedding is trained, on a CPU and without special options. On CUDA `index_add_` sums in no fixed order, so a
    step could not be repeated bit for bit."""
    special = embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse
    return embedding.weight.requires_grad and embedding.weight.device.type == "cpu" and not special


class Casts:
    """The casts of the weights of a model's linear layers to the dtype that they compute in. Inside `keeping`, on a CPU, a
    weight is cast once for all passes."""

    def __init__(self) -> None:
        self._weights: dict[int, torch.Tensor] | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside the block casts are kept, so weights must not change there."""
        self._weights = {}
        try:
            yield
        finally:
            self._weights = None

    def weight(self, weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """Return a weight in the dtype `kind`, without a graph."""
        if self._weights is None or weight.dtype is kind or weight.device.type != "cpu":
            return weight.detach().to(kind)  # a GPU casts fast, and its memory is short
        if id(weight) not in self._weights:
            self._weights[id(weight)] = weight.detach().to(kind)
        return self._weights[id(weight)]


class AddingLinear(nn.Linear):
    """`nn.Linear`, (..., in) to (..., out), whose backward pass adds the weight's gradient in place."""

    casts: Casts

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 — its name in torch
        """Compute as `nn.Linear` does, in autocast's dtype if autocast is on."""
        device = input.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        low = self.casts.weight(self.weight, kind)
        result: torch.Tensor = _Linear.apply(input.to(kind), self.weight, low)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias.to(kind)


class AddingEmbedding(nn.Embedding):
    """`nn.Embedding`, (...) ids to (..., H), whose backward pass adds the table's gradient in place."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 — its name in torch
        """Look up the ids as `nn.Embedding` does."""
        result: torch.Tensor = _Embedding.apply(input, self.weight, self.padding_idx)  # type: ignore[no-untyped-call]
        return result


class _Linear(torch.autograd.Function):
    """given @ low.T, where `low` is `weight` in the dtype of `given`; the backward pass adds the weight's gradient to
    `weight.grad` itself."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, low)
        ctx.weight = weight
        return given @ low.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        given, low = ctx.saved_tensors
        weight = ctx.weight
        if ctx.needs_input_grad[1]:
            rows, columns = grad.reshape(-1, grad.shape[-1]), given.reshape(-1, given.shape[-1])
            if weight.grad is None:
                weight.grad = (rows.T @ columns).to(weight.dtype)
            elif weight.dtype is grad.dtype:
                weight.grad.addmm_(rows.T, columns)
            else:
                weight.grad.add_(rows.T @ columns)
        return grad @ low if ctx.needs_input_grad[0] else None, None, None


class _Embedding(torch.autograd.Function):
    """Rows of a table; the backward pass adds the gradient to `weight.grad` itself. The padding's row has no gradient."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = weight.new_zeros(weight.shape)
        chosen, rows = ids.flatten(), grad.reshape(-1, grad.shape[-1]).to(weight.dtype)
        if ctx.padding is not None:
            rows = rows.masked_fill((chosen == ctx.padding)[:, None], 0)
        weight.grad.index_add_(0, chosen, rows)
        return None, None, None


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class CausalLM:
    """A loaded model. `folder` is the folder that it was loaded from; it computes and is exported in `dtype`."""

    model: PreTrainedModel
    folder: Path
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    logits: Logits
    """The function from hidden states (N, H) to logits (N, V)."""
    casts: Casts

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, T, H), after the last norm, of token ids (B, T). Rows may be padded on the right."""
        return _hidden(self.model, ids)

    def hidden_attending(self, ids: torch.Tensor, positions: torch.Tensor, attending: object) -> torch.Tensor:
        """Return the hidden states (1, T, H) of token ids (1, T) at these positions (1, T). Every attention layer gets the
        argument `attending`."""
        states: torch.Tensor = trunk(self.model)(
            input_ids=ids, position_ids=positions, use_cache=False, attending=attending
        ).last_hidden_state
        return states

    def computing(self) -> AbstractContextManager[object]:
        """Return the context for forward passes: autocast if the model computes in bfloat16."""
        return _autocast(self.device, self.dtype)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside the block the model computes in evaluation mode, without gradients and without checkpointing."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            gradient_mode(self.model)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside the block LoRA's adapters are switched off, so the model computes as before they were added."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(enabled=False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(enabled=True)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained, by name."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: torch.device,
    lora: LoraConfig | None = None,
    gradient_checkpointing: bool = False,
    max_model_len: int | None = None,
    base: CausalLM | None = None,
) -> CausalLM:
    """Load a `transformers` causal LM folder for training with a vLLM of this `max_model_len` (None and 0 as in
    `engines.loading.served_length`). With `base`, a model with adapters from the same folder, on the same device and in the
    same dtype, nothing is read: the two share the tensors of their base model. Raises `EngineError` naming the folder and
    what is wrong."""
    kind = _resolve_dtype(dtype, device)
    held = torch.float32 if kind is torch.bfloat16 and lora is None else kind
    with torch.random.fork_rng(
        []
    ):  # some families draw random numbers at loading, which would change the first adapters
        model = base_of(base.model) if base else read_model(folder, dtype=held).to(device)
    context = fix_positions(model, folder, max_model_len)
    if lora is not None:
        add_adapters(model, lora)
    beside = beside_text(model)
    for parameter in model.parameters():
        if id(parameter) in beside:
            parameter.requires_grad_(requires_grad=False)
    casts = add_in_place(model)
    if gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise EngineError(
            f"{type(model).__name__} in {folder} cannot compute its activations a second time: set "
            "engine.gradient_checkpointing = false"
        )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.no_grad(), _autocast(device, kind):
        logits = _find_output(model.eval(), device, folder)
    vocab_size = int(model.get_output_embeddings().weight.shape[0])

    def compute(ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        with _autocast(device, kind):
            return _hidden(model, ids, **({} if positions is None else {"position_ids": positions}))

    refuse_dependence(model, compute, dtype=kind, vocab_size=vocab_size, context=context, folder=folder)
    return CausalLM(model, folder, device, kind, vocab_size, logits, casts)


def resolve_device(device: str) -> torch.device:
    """Return the device to train on; `auto` is CUDA if there is a device, else the CPU. Raises `EngineError` if it is not
    there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise EngineError(f"engine.device = {device!r} is not a device: use auto, cpu, cuda or cuda:N") from error
    if found.type not in ("cpu", "cuda"):
        raise EngineError(f"the torch engine trains on cpu or cuda, not on {device!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"engine.device = {device!r}, but torch sees {torch.cuda.device_count()} CUDA devices: set engine.device to "
            "auto, or install a CUDA build of torch"
        )
    return found


def _resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise EngineError(f"engine.dtype = {dtype!r} is unknown: use auto, float32 or bfloat16")
    return DTYPES[dtype]


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    if dtype is torch.bfloat16:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def _hidden(model: PreTrainedModel, ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    states: torch.Tensor = trunk(model)(input_ids=ids, use_cache=False, **more).last_hidden_state
    return states


def _find_output(model: PreTrainedModel, device: torch.device, folder: Path) -> Logits:
    """Return the function from hidden states to logits, which for some families caps or scales the output of the last layer. It
    is found by comparing with the model's own logits; raises `EngineError` if no known function gives these."""
    ids = torch.arange(4, device=device)[None]
    try:
        expected = model(input_ids=ids, use_cache=False).logits[0]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"transformers {transformers.__version__} cannot compute {type(model).__name__} in {folder} ({error}): try another "
            "version of transformers, or train a model of another family"
        ) from error
    hidden = _hidden(model, ids)[0]
    candidates = outputs_of(model.get_output_embeddings(), model.config.get_text_config())
    return same_output(((logits, logits(hidden)) for logits in candidates), expected, model, folder)


logger = logging.getLogger(__name__)


class Reference:
    """The reference model of a trained model: the model in `folder`, or if that is None the trained model as it was at first.
    With LoRA the latter is the trained model without its adapters and needs no memory; otherwise a second model is loaded at
    the first use."""

    def __init__(
        self, trained: CausalLM, *, lora: bool, folder: Path | None = None, max_model_len: int | None = None
    ) -> None:
        self._served = max_model_len
        self._trained, self._lora, self._folder = trained, lora and folder is None, folder or trained.folder
        self.takes_trees: bool | None = True if folder is None else None
        """Whether the reference can be computed over a tree if the trained model can; None means not tested yet."""
        self._copy: CausalLM | None = None

    def beside(self, trained: CausalLM) -> Reference:
        """Return the reference model of another trained model on the same base."""
        return Reference(trained, lora=True) if self._lora else self

    @contextmanager
    def model(self) -> Iterator[CausalLM]:
        """Yield the reference model, for computing without gradients inside the block."""
        if self._lora:
            with self._trained.without_adapters():
                yield self._trained
        else:
            yield self._loaded()

    def _loaded(self) -> CausalLM:
        if self._copy is None:
            folder, device = self._folder, self._trained.device
            logger.info("loading the reference model from %s", folder)
            doing = "loading the reference model, which without adapters is a second copy beside the trained one"
            doing = (
                doing if folder == self._trained.folder else f"loading the teacher {folder} beside the trained model"
            )
            with needing_room(doing), torch.random.fork_rng([device] if device.type == "cuda" else []):
                self._copy = load_model(
                    folder,
                    dtype=str(self._trained.dtype).removeprefix("torch."),
                    device=device,
                    max_model_len=self._served,
                )
            self._copy.model.requires_grad_(False)
        return self._copy

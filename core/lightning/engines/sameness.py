"""What every token of a model is tried for when it is loaded: its logprob depends on the tokens before it, and on nothing else.

The invariant: a model that passes computes the same hidden states of a row in the mode of gradients as in that of evaluation,
alone as beside a longer row that ends at the last place of the context, before as after other rows, and with the attention of
`transformers`' own reference code (`eager`). Attention that differs from it is replaced by it; everything else is refused by
the layer's name. The tokens are always the same, and all random states are left as they were.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning.engines.loading import gradient_mode, unwrapped
from lightning.errors import EngineError

logger = logging.getLogger(__name__)

ROUNDING = {torch.float64: 2e-4, torch.float32: 2e-4, torch.bfloat16: 0.1}
"""By what a model computes in, how far rounding may move a hidden state, relative to its norm. float64 is no better than
float32: most norms round to that inside. Measured on 30 layers: 1e-5 in float32, 0.02 in bfloat16."""
CONTROL_SHARE = 0.25
"""How much of what another context token changes a difference may be, at the most. Something that is wrong lets a token see one
token more or fewer, or at another place, so it changes as much as that."""
SHORT, LONG = 8, 12
"""Tokens of the row that is compared, and of the one beside it, where nothing happens at an edge."""
EDGES = ("chunk_size", "mamba_chunk_size")
"""What configurations call the tokens after which a state is handed on; both rows get longer by this, where it is not more
than `MOST`."""
MOST = 512
TRIES = 16
"""With random numbers in use, so often is a row computed: a layer may be skipped once in ten times."""

Computing = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Ids (B, T), and their positions (B, T) where they are not 0 to T - 1, to hidden states or logits (B, T, H)."""


def moved(states: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """(T,) how far each state is from the original one, relative to that one's norm."""
    away, size = ((of.double().square().sum(-1)).sqrt() for of in (states - original, original))
    return away / size


def refuse_dependence(
    model: nn.Module, compute: Computing, *, dtype: torch.dtype, vocab_size: int, context: int | None, folder: object
) -> None:
    """Try a model that computes in `dtype`, in its mode of gradients afterwards; `context` is how many places vLLM serves,
    None where nobody knows. Raises `EngineError` naming the layer that breaks the invariant, and the cure."""
    base = unwrapped(model)
    device = base.get_input_embeddings().weight.device
    config = base.config.get_text_config()
    edge = max(
        (size for name in EDGES if isinstance(size := getattr(config, name, 0), int) and size <= MOST), default=0
    )
    short, long = SHORT + edge, LONG + 2 * edge
    ids = 1 + torch.arange(long + 1, device=device)[None] * 7919 % (vocab_size - 1)
    places = _last_places(base, context, long)
    trial = _Trial(model, compute, ids, short, places, dtype, f"{type(base).__name__} in {folder}")
    with torch.no_grad(), _random_states(device):
        model.eval()
        trial.attention()
        repeats = trial.neighbours()
        gradient_mode(model)
        if any(module.training for module in model.modules()):
            trial.noise(repeats=repeats)


def _last_places(base: Any, context: int | None, long: int) -> torch.Tensor | None:
    """Positions (3, long) of rows from the first place on, but of the second one up to the context's last one; None where the
    model does not take positions, or nobody knows how many it has."""
    config, trunk = base.config.get_text_config(), base.get_decoder() or base
    known = context or getattr(config, "max_position_embeddings", None)
    if not isinstance(known, int) or known < long or "position_ids" not in inspect.signature(trunk.forward).parameters:
        return None
    device = base.get_input_embeddings().weight.device
    return torch.arange(long, device=device) + torch.tensor([[0], [known - long], [0]], device=device)


def _seeded(seed: int) -> list[object]:
    """Seed all that layers draw from, and return its state."""
    torch.manual_seed(seed)
    random.seed(seed)
    return _drawn_from()


def _drawn_from() -> list[object]:
    """The states of all random numbers that layers may draw."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [random.getstate(), *(state.tolist() for state in (torch.get_rng_state(), *cuda))]


@contextmanager
def _random_states(device: torch.device) -> Iterator[None]:
    python = random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)


@dataclass(slots=True)
class _Trial:
    model: nn.Module
    compute: Computing
    ids: torch.Tensor
    """(1, long + 1); the last one stands in for another in the control."""
    short: int
    """Tokens of the row that is compared."""
    places: torch.Tensor | None
    dtype: torch.dtype
    what: str
    row: torch.Tensor = field(init=False)
    """States (short, H) of the row by itself."""
    between: torch.Tensor = field(init=False)
    """The same of it above longer ones."""
    control: float = field(default=0.0, init=False)
    """How far another token in the row moves the states behind it."""

    def alone(self) -> torch.Tensor:
        return self.compute(self.ids[:, : self.short], None)[0]

    def beside(self) -> torch.Tensor:
        """States (3, long, H) of the row, padded with zeros as the engine's micro-batches are, of a longer one at the last
        places, and of the control: the row with another token."""
        rows = torch.cat([self.ids[:, :-1], self.ids[:, 1:].flip(1), self.ids[:, :-1]])
        rows[0, self.short :] = 0
        rows[2, 1] = self.ids[0, -1]
        return self.compute(rows, self.places)

    def off(self, states: torch.Tensor, share: float = 1.0) -> float:
        """How far the last states are from the row's, in the median: a router that rounding tips over moves few. 0: not further
        than this `share` of what rounding explains."""
        away = float(moved(states, self.row)[-SHORT:].median())
        return 0.0 if away <= share * min(ROUNDING[self.dtype], CONTROL_SHARE * self.control) else away

    def attention(self) -> None:
        """Compute the row, and take `eager` where the attention in use leaves something out, as `sdpa` does with a cap of the
        scores."""
        config = unwrapped(self.model).config.get_text_config()
        used = config._attn_implementation  # noqa: SLF001 — transformers has no other name for it
        self.row = self.alone()
        config._attn_implementation = "eager" if used == "sdpa" else used  # noqa: SLF001
        eager = self.alone()
        config._attn_implementation = used  # noqa: SLF001
        self._above()
        capped = [name for name, value in vars(config).items() if "att" in name and "cap" in name and value]
        away = self.off(eager)
        if used == "sdpa" and (capped or away):
            why = (
                f"which leaves out {capped[0]}"
                if capped
                else f"which moves the hidden states by {away:.1e} of their norm"
            )
            logger.info("%s is computed with eager attention, not with %s, %s", self.what, used, why)
            config._attn_implementation, self.row = "eager", eager  # noqa: SLF001
            self._above()

    def _above(self) -> None:
        """Compute the row above others, and the control."""
        found = self.beside()
        self.between = found[0, : self.short]
        self.control = float(moved(found[2, : self.short], self.between)[2:].mean())

    def neighbours(self) -> bool:
        """Raises where a row depends on those beside it, or on rows before it; returns whether it is the same to the last bit
        when it is computed again."""
        if away := self.off(self.between):
            raise EngineError(
                f"{self.what} gives a row other hidden states beside a longer row than alone (by {away:.1e} of their norm), "
                f"first in {self._first(self.alone, self.beside)}: its logprobs would not be those that vLLM sampled with. "
                "If config.json scales the positions of long contexts, set policy_server.max_model_len to the length before "
                "scaling; otherwise train a model of another family"
            )
        again = self.alone()
        if away := self.off(again):
            raise EngineError(
                f"{self.what} gives a row other hidden states after other rows than before them (by {away:.1e} of their "
                f"norm), first in {self._first(self.alone, self.alone)}: train a model of another family"
            )
        return torch.equal(again, self.row)

    def noise(self, *, repeats: bool) -> None:
        """Raises where a row depends on chance, or on the mode. Of one that `repeats` rounding explains next to nothing."""
        for seed in range(TRIES):
            before = _seeded(seed)
            away = self.off(self.alone(), 0.01 if repeats else 1.0)
            if away:
                raise EngineError(
                    f"{self.what} gives other hidden states in training mode than in evaluation mode (they differ by "
                    f"{away:.1e} of their norm), first in {self._first(self._evaluated, partial(self._drawn, seed))}: set "
                    "engine.gradient_checkpointing = false, or set that layer's noise to 0 in the folder's config.json"
                )
            if _drawn_from() == before:
                return

    def _drawn(self, seed: int) -> torch.Tensor:
        _seeded(seed)
        return self.alone()

    def _evaluated(self) -> torch.Tensor:
        self.model.eval()
        try:
            return self.alone()
        finally:
            gradient_mode(self.model)

    def _first(self, one: Callable[[], torch.Tensor], other: Callable[[], torch.Tensor]) -> str:
        """The first layer, in the order of computing, whose output for the row differs between two ways to compute it."""
        found = [self._outputs(way) for way in (one, other)]
        for name, states in found[0].items():
            others = found[1].get(name)
            if others is None or others.shape != states.shape:
                continue
            if float(moved(others, states).nan_to_num(0.0)[-SHORT:].median()) > ROUNDING[self.dtype] / 10:
                return name
        return "a place that has no module of its own"

    def _outputs(self, way: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        """What each module gives of the row, by its name and class, in the order of computing."""
        found: dict[str, torch.Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _given: object, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) and output else output
                if isinstance(first, torch.Tensor) and first.ndim > 1 and first.is_floating_point():
                    found.setdefault(name, first.flatten(0, -2)[: self.short].clone())

            return hook

        hooks = [
            module.register_forward_hook(keep(f"{name} ({type(module).__name__})"))
            for name, module in self.model.named_modules()
            if name
        ]
        try:
            way()
        finally:
            for hook in hooks:
                hook.remove()
        return found

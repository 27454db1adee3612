"""The test of a model at loading that a token's logprob depends on the tokens before it, and on nothing else.

The invariant: a model that passes computes the same hidden states of a row in the mode of gradients and in that of evaluation;
alone and beside a longer row that ends at the last position of the context; before and after other rows; and with the attention
of `transformers`' reference code (`eager`). Attention that differs is replaced by `eager`; any other difference is refused,
naming the layer. The test's tokens are always the same, and it leaves all random states as they were.
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
"""By a model's dtype, the largest difference of a hidden state, relative to its norm, that counts as rounding. float64 has the
bound of float32, since most norms compute in that inside. Measured on 30 layers: 1e-5 in float32, 0.02 in bfloat16."""
CONTROL_SHARE = 0.25
"""The largest allowed difference as a share of the change that another token in the context makes (the control). A fault lets a
token see one token more or fewer, or at another place, so it changes about as much as the control."""
SHORT, LONG = 8, 12
"""The lengths in tokens of the compared row and of the longer row beside it, for a model without `EDGES`."""
EDGES = ("chunk_size", "mamba_chunk_size")
"""Names in configurations for the number of tokens after which a layer hands on a state (a chunk). The compared rows are made
longer by it if it is at most `MOST`."""
MOST = 512
TRIES = 16
"""How often a row is computed if layers draw random numbers, since a layer may be skipped in one of ten passes only."""

Computing = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A function from ids (B, T) and positions (B, T), None for 0 to T - 1, to hidden states or logits (B, T, H)."""


def moved(states: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return the distance of each state from its original, relative to the original's norm, shape (T,)."""
    away, size = ((of.double().square().sum(-1)).sqrt() for of in (states - original, original))
    return away / size


def refuse_dependence(
    model: nn.Module, compute: Computing, *, dtype: torch.dtype, vocab_size: int, context: int | None, folder: object
) -> None:
    """Test a model that computes in `dtype`, and leave it in the mode of gradients. `context` is the number of positions that
    vLLM serves, None if unknown. Raises `EngineError` naming the layer that breaks the invariant, and the cure."""
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
    """Return the positions (3, long) of three rows: from 0 on, but those of the second row end at the context's last position.
    None if the model does not take positions, or the length of its context is unknown or too short."""
    config, trunk = base.config.get_text_config(), base.get_decoder() or base
    known = context or getattr(config, "max_position_embeddings", None)
    if not isinstance(known, int) or known < long or "position_ids" not in inspect.signature(trunk.forward).parameters:
        return None
    device = base.get_input_embeddings().weight.device
    return torch.arange(long, device=device) + torch.tensor([[0], [known - long], [0]], device=device)


def _seeded(seed: int) -> list[object]:
    """Seed the random generators that layers may draw from, and return their states."""
    torch.manual_seed(seed)
    random.seed(seed)
    return _drawn_from()


def _drawn_from() -> list[object]:
    """Return the states of all random generators that layers may draw from."""
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
    """The test's token ids, shape (1, long + 1). The last one replaces a token of the row in the control."""
    short: int
    """The number of tokens of the compared row."""
    places: torch.Tensor | None
    dtype: torch.dtype
    what: str
    row: torch.Tensor = field(init=False)
    """The states (short, H) of the row computed alone."""
    between: torch.Tensor = field(init=False)
    """The states (short, H) of the row computed in one batch with longer rows."""
    control: float = field(default=0.0, init=False)
    """The relative change of later states when another token stands in the row."""

    def alone(self) -> torch.Tensor:
        return self.compute(self.ids[:, : self.short], None)[0]

    def beside(self) -> torch.Tensor:
        """Return the states (3, long, H) of three rows in one batch: the row, padded with zeros as in the engine's
        micro-batches; a longer row at the last positions; and the control, the row with another token."""
        rows = torch.cat([self.ids[:, :-1], self.ids[:, 1:].flip(1), self.ids[:, :-1]])
        rows[0, self.short :] = 0
        rows[2, 1] = self.ids[0, -1]
        return self.compute(rows, self.places)

    def off(self, states: torch.Tensor, share: float = 1.0) -> float:
        """Return the median relative distance of the last states from the row's, or 0 if it is at most this `share` of what
        rounding explains. It is the median because rounding may make a router choose other experts for a few tokens."""
        away = float(moved(states, self.row)[-SHORT:].median())
        return 0.0 if away <= share * min(ROUNDING[self.dtype], CONTROL_SHARE * self.control) else away

    def attention(self) -> None:
        """Compute the row, and switch the model to `eager` attention if `sdpa` leaves something out, such as a cap of the
        scores, or gives other states."""
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
        """Compute the row in one batch with longer rows, and the control."""
        found = self.beside()
        self.between = found[0, : self.short]
        self.control = float(moved(found[2, : self.short], self.between)[2:].mean())

    def neighbours(self) -> bool:
        """Raise `EngineError` if a row depends on other rows in its batch or on rows computed before. Return whether computing
        the row again gives the same states bit for bit."""
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
        """Raise `EngineError` if a row depends on random numbers or on the mode of the model. If computing again `repeats` bit
        for bit, almost no difference counts as rounding."""
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
        """Return the name of the first layer, in the order of computing, whose output for the row differs between two ways of
        computing it."""
        found = [self._outputs(way) for way in (one, other)]
        for name, states in found[0].items():
            others = found[1].get(name)
            if others is None or others.shape != states.shape:
                continue
            if float(moved(others, states).nan_to_num(0.0)[-SHORT:].median()) > ROUNDING[self.dtype] / 10:
                return name
        return "a place that has no module of its own"

    def _outputs(self, way: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the output of each module for the row, by the module's name and class, in the order of computing."""
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

"""The interface of a loss function: its tokens, its output, and its optional `prepare`.

The invariant: a loss is a sum over tokens of `weights * something`, so splitting tokens over micro-batches does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lightning.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from lightning.batch.sample import FloatArray, IntArray, TokenSpan


KlEstimator = Literal["k1", "k2", "k3"]
"""The estimator of KL(pi || pi_ref) from d = log pi(a|s) - log pi_ref(a|s) of a sampled token
(http://joschu.net/blog/kl-approx.html): `k1` d · `k2` d² / 2 · `k3` exp(-d) - 1 + d.

In a loss only the gradient matters. That of `k2` is d · grad log pi, whose expectation under pi is the gradient of
KL(pi || pi_ref), as wanted. That of k1 would be grad log pi, whose expectation is 0, so it would penalise nothing; `k1` here
has its own value and k2's gradient. That of `k3` is (1 - exp(-d)) · grad log pi, whose expectation is the gradient of the
*other* direction, KL(pi_ref || pi), which GRPO (arXiv 2402.03300, equation 4) trains. They agree to first order in d.
"""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of one micro-batch, flat, as torch tensors of shape (N,): the argument of a loss function."""

    logprobs: torch.Tensor
    """Current policy's logprobs of the sampled tokens; the gradient flows through it."""
    old_logprobs: torch.Tensor
    """Logprobs that the ratio is taken against: the sampler's if it gave one, else the trainer's at the start of the step,
    which at the step's first update are the current ones, detached."""
    advantages: torch.Tensor
    weights: torch.Tensor
    entropy: torch.Tensor
    """Entropy (nats) of the current policy at each token, differentiable."""
    has_old: torch.Tensor
    """Bool: the sampler gave a logprob for this token."""
    versions: torch.Tensor | None = None
    """Int: the policy version that sampled each token; -1 where nobody knows it."""
    reference: torch.Tensor | None = None
    """Logprobs under the reference model, without a gradient; only for a loss that `needs_reference`."""
    prepared: torch.Tensor | None = None
    """The number that the loss's own `prepare` gave for each token; only for a `StepLoss`."""
    top_logprobs: torch.Tensor | None = None
    """Logprobs (N, k) of the k most probable tokens at each place, the largest first, differentiable; only for a loss with
    `needs_top_logprobs` = k. They are of the distribution that `logprobs` and `entropy` are of: at the call's temperature, and
    under its sampling mask. Where a mask keeps fewer than k tokens, the rest have the lowest number of the dtype, so that p and
    p log p are 0, and no gradient."""
    top_ids: torch.Tensor | None = None
    """Int: the ids (N, k) of these tokens; -1 where a mask keeps fewer than k."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """All N trained tokens of one update before it is made, as numpy arrays of shape (N,), in the order of the rows and of the
    tokens in each row: the argument of `StepLoss.prepare`, for losses over whole calls, rollouts or pairs of rollouts."""

    logprobs: npt.NDArray[np.floating]
    """The current policy's; float32, or float64 where the model computes in it."""
    old_logprobs: npt.NDArray[np.floating]
    """The sampler's if it gave one, else the trainer's at the start of the step."""
    advantages: FloatArray
    weights: FloatArray
    versions: IntArray
    reference: npt.NDArray[np.floating] | None
    calls: npt.NDArray[np.int64]
    """The index in `spans` of the call that each token belongs to."""
    spans: tuple[TokenSpan, ...]
    entropy: npt.NDArray[np.floating] | None = None
    """Entropy (nats) of the current policy at each token; None from an engine that does not compute it beforehand (verl)."""
    top_logprobs: npt.NDArray[np.floating] | None = None
    """Logprobs (N, k) of the k most probable tokens, as in `TokenBatch`, for a loss with `needs_top_logprobs` = k; None from an
    engine that does not compute them beforehand (verl)."""
    top_ids: IntArray | None = None
    """The ids (N, k) of these tokens; -1 where a mask keeps fewer than k."""


TAKEN = frozenset((
    "calls_per_rollout", "clip_fraction_last", "drift_tokens", "ess", "failed", "grad_norm", "groups", "groups_used",
    "loss", "lr", "max_logprob_gap", "mean_logprob_gap", "microbatches", "p999_logprob_gap", "preemptions",
    "prefix_hit_share", "reward", "reward_std", "reward_with_failures", "rollouts", "rollouts_trained", "rows",
    "skipped_nonfinite", "staleness_max", "staleness_mean", "stepped", "tokens", "tokens_compared", "tokens_forward",
    "tokens_per_second", "too_long", "tree", "truncated", "updates",
))  # fmt: skip
"""The metrics of a step that are no loss's. Other names of the engine and of plugins have a slash."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` is a scalar: the weighted *sum* over the micro-batch's tokens. `metrics` are weighted sums too (detached); the
    engine divides them by the sum of the weights of the tokens whose losses report them. Names that end in `_max` are maxima
    instead. Raises `ConfigError` for the name of a metric that is another one's, or has a slash."""

    loss: torch.Tensor
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name in TAKEN or "/" in name:
                why = "has a slash, as those of plugins have" if "/" in name else "is one of lightning's own"
                raise ConfigError(f"a loss cannot report the metric {name!r}: the name {why}; choose another one")


class Loss(Protocol):
    """A pure function from tokens to a loss. The loss must be a sum over tokens of `weights * something`, so that splitting the
    tokens over micro-batches does not change it. Optional attributes: `needs_reference` and `over_all_tokens`, both False if
    they are absent, and `needs_top_logprobs`, the number of most probable tokens in `TokenBatch.top_logprobs`."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the loss of one micro-batch's tokens with its metrics."""


@runtime_checkable
class StepLoss(Loss, Protocol):
    """A loss that depends on more than single tokens (a call's mean ratio, a pair of rollouts).

    One micro-batch need not hold all tokens of a call. So such a loss has two parts: `prepare` gets every token of an update,
    without gradients, and returns one number for each; `__call__` is a sum over tokens again, and finds these numbers in
    `TokenBatch.prepared`. This costs one more forward pass. An update is on all rows of a step, or on the whole rows of a
    mini-batch (`engine.minibatches`). A loss that compares rows has `whole_step = True`, and is refused with mini-batches.
    """

    def prepare(self, step: StepTokens) -> npt.NDArray[np.floating]:
        """Return one number for each token, shape (N,)."""


def needs_reference(loss: object) -> bool:
    """Whether a loss compares with the reference model (the one that training began with): it has `needs_reference = True`."""
    return bool(getattr(loss, "needs_reference", False))


def needs_top_logprobs(loss: object) -> int:
    """Return the number k of most probable tokens whose logprobs a loss wants (`needs_top_logprobs`); 0 for a loss without, or
    with None. Raises `ConfigError`, naming the loss, for a k that is no number of tokens."""
    wanted = getattr(loss, "needs_top_logprobs", None)
    if wanted is None:
        return 0
    if type(wanted) is not int or wanted < 1:
        raise ConfigError(
            f"the loss {name_of(loss)} has needs_top_logprobs = {wanted!r}: set it to the number of most probable tokens "
            "whose logprobs the loss wants, a whole number from 1 on, or leave it out"
        )
    return wanted


def check_top_logprobs(loss: object, vocab_size: int) -> None:
    """Raise `ConfigError`, naming the loss, if it wants logprobs of more tokens than a model with this vocabulary has."""
    if (wanted := needs_top_logprobs(loss)) > vocab_size:
        raise ConfigError(
            f"the loss {users_name_of(loss)} has needs_top_logprobs = {wanted}, and the model's vocabulary has {vocab_size} "
            f"tokens: set it to {vocab_size} at the most"
        )


def users_name_of(loss: object) -> str:
    """Return the name of the user's own function or object in a loss of lightning, or else of the loss, for messages."""
    return name_of(next((each for name in ("given", "surrogate") if callable(each := getattr(loss, name, None))), loss))


def over_all_tokens(loss: object) -> bool:
    """Whether a loss is over the softmax of all tokens, also where the sampler drew among some alone (a sampling mask): it has
    `over_all_tokens = True`. Then a token that a grammar forced is learned too, and the sampler's logprob of a token with a
    mask is no old logprob: it is of another distribution."""
    return bool(getattr(loss, "over_all_tokens", False))


def check_updates(loss: object, *, several: bool, parts: bool) -> None:
    """Raise `ConfigError` for a loss that would silently compute something else with `several` updates in a step (a decoupled
    correction), or on `parts` of the step's rows (a loss with `whole_step = True`)."""
    if parts and getattr(loss, "whole_step", False):
        raise ConfigError(
            f"{name_of(loss)} compares the rows of a whole step, which mini-batches would separate: set "
            "engine.minibatches = 1, or give forward_backward() the batch alone"
        )
    correction = getattr(loss, "correction", None)
    if several and getattr(correction, "decoupled", False):
        raise ConfigError(
            f"a correction of the kind {getattr(correction, 'kind', '')!r} needs the policy's logprobs at the start of the "
            "step, which are not kept over several updates in a step: take one update, with engine.minibatches = 1 and "
            "engine.epochs = 1, or set correction = 'mask'"
        )


def name_of(function: object) -> str:
    """Return the name of a user's function, or of the class of a callable object, for messages."""
    inner = function.func if isinstance(function, partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


def prepared_by(loss: StepLoss, step: StepTokens) -> npt.NDArray[np.floating]:
    """Return the result of a loss's `prepare`. Raises `ConfigError` if it fails because it uses a field of the step that nobody
    computed (`reference`, `entropy`, `top_logprobs`)."""
    try:
        return loss.prepare(step)
    except (TypeError, AttributeError) as error:
        known = step.reference is not None and step.entropy is not None and step.top_logprobs is not None
        if "NoneType" not in str(error) or known:
            raise
        raise ConfigError(
            f"prepare of the loss {name_of(getattr(loss, 'preparer', loss))} failed on a value that is None ({error}): "
            "step.reference is set only for a loss with needs_reference = True, step.top_logprobs for a loss with "
            "needs_top_logprobs = k, and these and step.entropy only by the engine torch"
        ) from error


def said_by(function: Callable[[TokenBatch], object], batch: TokenBatch) -> object:
    """Call a user's loss function and return its result. Raises `ConfigError` if the function fails because it uses a field of
    the batch that it did not ask for (`reference`, `prepared`, `top_logprobs`)."""
    try:
        return function(batch)
    except (TypeError, AttributeError) as error:
        missing = batch.reference is None or batch.prepared is None or batch.top_logprobs is None
        if not (missing and "NoneType" in str(error)):
            raise
        raise ConfigError(
            f"the loss {name_of(function)} failed on a value that is None ({error}): tokens.reference is set only for a loss "
            "with needs_reference = True (for a function: @from_loss(needs_reference=True)), tokens.top_logprobs only for a "
            "loss with needs_top_logprobs = k, and tokens.prepared only for a loss with a method prepare"
        ) from error

"""Decorators that make a user's own algorithm from one function.

The invariant: the decorators make a dataclass whose fields are plain arguments and whose name is the function's. So a run's
record holds the whole algorithm (of the function, enough to see that it was edited), and an audit can make the algorithm again
if it is registered under that name.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, overload

from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.presets import PRESETS
from lightning.algorithms.protocol import Algorithm, Batch
from lightning.algorithms.spec import types_of
from lightning.batch.trajectory import Group
from lightning.config.arguments import refuses_unknown
from lightning.errors import ConfigError
from lightning.losses.correction import NO_CORRECTION, Correction
from lightning.losses.custom_loss import as_loss, check_callable, is_whole
from lightning.losses.protocol import Loss, name_of

if TYPE_CHECKING:
    from lightning.losses.policy_gradient import OwnLoss

logger = logging.getLogger(__name__)

TAKEN = ("name", "loss", "batch", "own_functions")
"""Attributes of the algorithm, whose names no argument may have. `own_functions` are the user's functions, for the run's
record."""


@overload
def from_loss(function: OwnLoss, /) -> type[LightningRL]: ...


@overload
def from_loss(
    *, needs_reference: bool = False, needs_top_logprobs: int | None = None
) -> Callable[[OwnLoss], type[LightningRL]]: ...


def from_loss(
    function: OwnLoss | None = None, /, *, needs_reference: bool = False, needs_top_logprobs: int | None = None
) -> object:
    """Decorator that turns a loss function into an algorithm: LightningRL with this function as its surrogate.

    `function(tokens)` gets a `TokenBatch` and returns one loss for each token, shape (N,), to be minimised; it must not add
    them up, or the loss would depend on how rows are split. All else is LightningRL's: the result takes its arguments
    (`my_loss("rloo", group_size=4)`), low level and credit decide advantages and weights, and an entropy bonus, a KL penalty
    and a `correction` can be added; the default is no correction. Only the function itself clips: `clip_low`, `clip_high` and
    `ratio` have no effect, and the log warns if one is given. Calls whose advantage is 0 keep their rows, since the function
    may train on them. To use the algorithm by name, register it under the function's own name.

    With `needs_reference` the function finds the reference model's logprobs in `tokens.reference`, and with
    `needs_top_logprobs` = k those of the k most probable tokens in `tokens.top_logprobs`. A callable object may have attributes
    of these names instead, and may have a method `prepare` (`StepLoss`).
    """
    if function is None:
        return partial(from_loss, needs_reference=needs_reference, needs_top_logprobs=needs_top_logprobs)
    check_callable(function, "from_loss")
    name = name_of(function)
    if is_whole(function):
        raise ConfigError(
            f"from_loss got {name}, which is a whole loss (it returns a LossOutput): give it as from_batch(loss=...) or "
            "Intake.batch(loss=...), or write a function that returns one loss for each token"
        )
    needs = {"needs_reference": needs_reference or None, "needs_top_logprobs": needs_top_logprobs}
    surrogate = function if all(need is None for need in needs.values()) else _with_needs(function, needs)
    told: set[str] = set()

    def check(self: LightningRL) -> None:
        if self.correction is None:
            object.__setattr__(self, "correction", NO_CORRECTION)
        LightningRL.__post_init__(self)
        assert isinstance(self.correction, Correction)
        _warn_of_clips(self, self.correction, name, told)

    members = {
        "__slots__": (),
        "__module__": function.__module__,
        # A callable object has no `__qualname__`, and its class's is taken: pickle and the run's record need another one.
        "__qualname__": getattr(function, "__qualname__", f"from_loss({name})"),
        "__doc__": function.__doc__,
        "__post_init__": check,
        "name": property(lambda self: name),
        "loss": property(lambda self: self.loss_with(surrogate)),
        "zero_advantage_teaches": True,
        "own_functions": {
            "loss": function,
            **{each: need for each in needs if (need := getattr(surrogate, each, None))},
        },
    }
    return type(name, (LightningRL,), members)


def _warn_of_clips(algorithm: LightningRL, correction: Correction, loss: str, told: set[str]) -> None:
    """Warn of arguments for clipping, which do nothing beside a loss of one's own, once for each field (`told`)."""
    for field in ("clip_low", "clip_high", "ratio"):
        value = getattr(algorithm, field)
        # A value of some preset is not warned about: `dataclasses.replace` may have kept it from another low level.
        others = PRESETS.values() if field != "ratio" else (PRESETS[algorithm.low_level],)
        if field == "ratio" and correction.decoupled:  # which leaves no other ratio
            continue
        if field not in told and all(value != getattr(preset, field) for preset in others):
            told.add(field)
            logger.warning(
                "%s=%s has no effect: the loss %s is used as it is, and only the loss itself can clip ratios; leave %s out",
                field,
                value,
                loss,
                field,
            )


def _with_needs(function: OwnLoss, needs: Mapping[str, object]) -> OwnLoss:
    """Return a wrapper of the function with these `needs` as attributes, beside the function's own; the user's own object is
    not changed. Raises `ConfigError` for a need that cannot be met."""
    wrapped = partial(function)
    for name in ("needs_reference", "needs_top_logprobs", "over_all_tokens", "prepare"):
        own = getattr(function, name, None) if needs.get(name) is None else needs[name]
        if own is not None:
            setattr(wrapped, name, own)
    check_callable(wrapped, "from_loss")
    return wrapped


@overload
def from_batch(function: Callable[..., Batch], /) -> Callable[..., Algorithm]: ...


@overload
def from_batch(*, loss: OwnLoss | Loss) -> Callable[[Callable[..., Batch]], Callable[..., Algorithm]]: ...


def from_batch(function: Callable[..., Batch] | None = None, /, *, loss: OwnLoss | Loss | None = None) -> object:
    """Decorator that turns a function from groups to a `Batch` into an algorithm.

    `function(groups, *, group_size=8, ...)` gets the step's finished groups and must be pure: a resume and an audit call it
    again. Its keyword-only parameters, all with plain defaults, are the algorithm's arguments; `group_size` is 8 if it is not
    among them. `lightning.algorithms.Intake` drops what cannot be trained on, counts it, and makes the batch.

    `loss` is a loss function as for `from_loss` (with the attribute `needs_reference = True` if it uses the reference model) or
    a whole `Loss`. Without `loss`, a batch that another algorithm made (`LightningRL(...).batch(groups)`) is trained with that
    algorithm's loss, any other batch with GRPO's. A batch may have its own loss (`Intake.batch(..., loss=...)`). To use the
    algorithm by name, register it under the function's own name.
    """
    if function is None:
        return partial(from_batch, loss=loss)
    options = _options(function)
    given = None if loss is None else as_loss(loss, f"the algorithm {function.__name__}: from_batch(loss=...)")

    def batch(self: object, groups: Sequence[Group]) -> Batch:
        made = function(groups, **{option.name: getattr(self, option.name) for option in options})
        if not isinstance(made, Batch):
            raise ConfigError(f"the algorithm {function.__name__} returned {made!r}: it has to return a Batch")
        return made

    hints = types_of(function)
    fields = [
        (option.name, hints.get(option.name, object), dataclasses.field(default=option.default)) for option in options
    ]
    if "group_size" not in {option.name for option in options}:
        fields.append(("group_size", int, dataclasses.field(default=8)))
    members = {
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
        "name": property(lambda self: function.__name__),
        "loss": property(lambda self: LightningRL().loss if given is None else given),
        "passes_on_losses": given is None,
        "batch": batch,
        "own_functions": {"batch": function} | ({} if loss is None else {"loss": loss}),
    }
    made = dataclasses.make_dataclass(function.__name__, fields, namespace=members, frozen=True, kw_only=True)
    made.__module__ = function.__module__
    return refuses_unknown(made)


def _options(function: Callable[..., Batch]) -> list[inspect.Parameter]:
    """Return the function's keyword-only parameters. Raises `ConfigError` for a signature that an algorithm cannot have."""
    first, *rest = inspect.signature(function).parameters.values() or (None,)
    if first is None or first.kind is first.KEYWORD_ONLY:
        raise ConfigError(
            f"the algorithm {function.__name__} takes no groups: write {function.__name__}(groups, *, ...)"
        )
    for option in rest:
        if option.kind is not option.KEYWORD_ONLY or option.default is option.empty or option.name in TAKEN:
            raise ConfigError(
                f"the parameter {option.name!r} of the algorithm {function.__name__} must be keyword-only, have a default, "
                f"and not be called {', '.join(TAKEN)}: write {function.__name__}(groups, *, group_size=8, ...)"
            )
    return rest

"""A user's own algorithm from one function.

The invariant: what the decorators make is a dataclass whose fields are plain arguments and whose name is the function's, so a
run's record holds all of it, and an audit can make it again once it is registered under that name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, overload

from lightning.algorithms.lightning_rl import LightningRL
from lightning.algorithms.protocol import Algorithm, Batch
from lightning.batch.trajectory import Group
from lightning.errors import ConfigError
from lightning.losses.protocol import Loss

if TYPE_CHECKING:
    from lightning.losses.policy_gradient import OwnLoss

TAKEN = ("name", "loss", "batch")


def from_loss(function: OwnLoss) -> type[LightningRL]:
    """Decorator: a loss function becomes an algorithm, LightningRL with this loss in the place of its surrogate.

    `function(tokens)` gets a `TokenBatch` and returns one loss for each token, shape (N,), to be minimised; it must not add
    them up, or the loss would depend on how rows are split. Everything else stays LightningRL's: the result is called with
    its arguments (`my_loss("rloo", group_size=4)`), low level and credit decide advantages and weights, and an entropy bonus,
    a KL penalty and `tis_cap` compose. Calls whose advantage is 0 keep their rows: what the function makes of them is its own
    affair. To use it by name, register it under the function's own name.
    """
    name = function.__name__

    def loss(self: LightningRL) -> Loss:
        return self.loss_with(function)

    members = {
        "__slots__": (),
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
        "name": property(lambda self: name),
        "loss": property(loss),
        "zero_advantage_teaches": True,
    }
    return type(name, (LightningRL,), members)


@overload
def from_batch(function: Callable[..., Batch], /) -> Callable[..., Algorithm]: ...


@overload
def from_batch(*, loss: OwnLoss) -> Callable[[Callable[..., Batch]], Callable[..., Algorithm]]: ...


def from_batch(function: Callable[..., Batch] | None = None, /, *, loss: OwnLoss | None = None) -> object:
    """Decorator: a function from groups to a `Batch` becomes an algorithm.

    `function(groups, *, group_size=8, ...)` gets the step's finished groups and must be pure: a resume and an audit call it
    again. Its keyword-only parameters, all with plain defaults, are the algorithm's arguments; `group_size` is 8 where it is
    none of them. `lightning.algorithms.Intake` drops what cannot be trained on, counts, and makes the batch.

    `loss` is a function as of `from_loss`; without it, the loss is GRPO's. A batch may bring another `Loss`
    (`Intake.batch(..., loss=...)`). To use the algorithm by name, register it under the function's own name.
    """
    if function is None:
        return partial(_from_batch, loss=loss)
    return _from_batch(function, loss=loss)


def _from_batch(function: Callable[..., Batch], *, loss: OwnLoss | None) -> Callable[..., Algorithm]:
    options = _options(function)

    def batch(self: object, groups: Sequence[Group]) -> Batch:
        made = function(groups, **{option.name: getattr(self, option.name) for option in options})
        if not isinstance(made, Batch):
            raise ConfigError(f"the algorithm {function.__name__} returned {made!r}: it has to return a Batch")
        return made

    fields = [(option.name, object, dataclasses.field(default=option.default)) for option in options]
    if "group_size" not in {option.name for option in options}:
        fields.append(("group_size", object, dataclasses.field(default=8)))
    members = {
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
        "name": property(lambda self: function.__name__),
        "loss": property(lambda self: LightningRL().loss if loss is None else LightningRL().loss_with(loss)),
        "batch": batch,
    }
    made = dataclasses.make_dataclass(function.__name__, fields, namespace=members, frozen=True, kw_only=True)
    made.__module__ = function.__module__
    return made


def _options(function: Callable[..., Batch]) -> list[inspect.Parameter]:
    """The keyword-only parameters. Raises `ConfigError` for a signature that cannot be an algorithm."""
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

"""The sampling masks of tokens: the ids among which each was drawn, and the biases of their logits.

The invariant: of a token with a mask, the sampler's distribution is softmax((logits + bias) / temperature) over the kept ids
alone. So its logprob, and every quantity of a loss, is computed over these. A mask never leaves out the token that was drawn.

A mask comes with the recorded call, as the extra of the plugin that asked the policy server for it. The core knows no format;
the plugin registers a reader (`register_masks`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from lightning.bounded import Once
from lightning.errors import DataError
from lightning.plugins import plugins

if TYPE_CHECKING:
    from lightning.types import Transition

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
log = logging.getLogger(__name__)
_said = Once()
Read = Callable[["Transition"], "SamplingMask"]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Ids of N tokens, one list behind another: those of token i are `ids[offsets[i]:offsets[i + 1]]`, with a number each in
    `values`, unless this is None."""

    offsets: Ints
    ids: Ids
    values: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, chosen: Ints | slice) -> Ragged:
        """Return the lists of some tokens, in the order in which these are chosen."""
        starts, counts = self.offsets[:-1][chosen], np.diff(self.offsets)[chosen]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        flat = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
        return Ragged(offsets, self.ids[flat], None if self.values is None else self.values[flat])

    @property
    def tokens(self) -> Ints:
        """The token of each id, shape (ids,)."""
        found: Ints = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        return found

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the lists of all parts, one part behind another."""
        ends = np.cumsum([0, *(len(part.ids) for part in parts)])
        offsets = [np.zeros(1, np.int64), *(part.offsets[1:] + end for part, end in zip(parts, ends, strict=False))]
        values = [part.values for part in parts if part.values is not None]
        return cls(
            np.concatenate(offsets),
            np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]),
            np.concatenate(values) if values else None,
        )


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The sampling masks of N tokens, in a vocabulary of `vocab_size`.

    `ids` are those that were left out where `is_left_out` (N,) says so, and else those that were kept. A token that was drawn
    among all ids has left out none. `bias` has the ids to whose logits something was added, and what.
    """

    vocab_size: int
    is_left_out: Bools
    ids: Ragged
    bias: Ragged

    @classmethod
    def none(cls, count: int, vocab_size: int) -> SamplingMask:
        """Return the mask of `count` tokens that were drawn among all ids."""
        empty = Ragged(np.zeros(count + 1, np.int64), np.zeros(0, np.int32))
        return cls(
            vocab_size,
            np.ones(count, np.bool_),
            empty,
            Ragged(empty.offsets, empty.ids, np.zeros(0, np.float32)),
        )

    def __len__(self) -> int:
        return len(self.is_left_out)

    def __getitem__(self, chosen: Ints | slice) -> SamplingMask:
        """Return the masks of some tokens, in the order in which these are chosen."""
        return SamplingMask(self.vocab_size, self.is_left_out[chosen], self.ids[chosen], self.bias[chosen])

    @classmethod
    def joined(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Return the masks of all parts, one part behind another. Raises `DataError` if they have different vocabularies."""
        sizes = sorted({part.vocab_size for part in parts})
        if len(sizes) != 1:
            raise DataError(f"the sampling masks of a row are of vocabularies of {' and '.join(map(str, sizes))} ids")
        return cls(
            sizes[0],
            np.concatenate([part.is_left_out for part in parts]),
            Ragged.joined([part.ids for part in parts]),
            Ragged.joined([part.bias for part in parts]),
        )

    @classmethod
    def placed(cls, length: int, masks: Mapping[int, SamplingMask]) -> SamplingMask:
        """Return the mask of a row of `length` tokens from those of some of its calls, by the index of their first token."""
        parts, at = [], 0
        for start, mask in sorted(masks.items()):
            parts += [cls.none(start - at, mask.vocab_size), mask]
            at = start + len(mask)
        return cls.joined([*parts, cls.none(length - at, parts[-1].vocab_size)])

    @property
    def is_set(self) -> Bools:
        """Whether each token (N,) was drawn from anything but the softmax of all logits."""
        found: Bools = ~self.is_left_out | (np.diff(self.ids.offsets) > 0) | (np.diff(self.bias.offsets) > 0)
        return found

    def keeps(self, tokens: npt.NDArray[np.integer]) -> Bools:
        """Return whether each of `tokens` (N,) is in its own mask's kept ids."""
        own = self.ids.tokens
        named = np.zeros(len(self), np.bool_)
        named[own[self.ids.ids == tokens[own]]] = True
        found: Bools = named != self.is_left_out
        return found

    def flaw(self) -> str:
        """Return why the ids cannot be those of its vocabulary; empty if they can."""
        for part in (self.ids, self.bias):
            if len(part.ids) and not 0 <= int(part.ids.min()) <= int(part.ids.max()) < self.vocab_size:
                return f"its sampling mask has ids outside of its own vocabulary of {self.vocab_size}"
        if self.bias.values is not None and not np.isfinite(self.bias.values).all():
            return "a logit bias of its sampling mask is not finite"
        return ""

    def update(self, digest: hashlib._Hash) -> None:
        """Add all that the mask says to a digest."""
        digest.update(np.int64(self.vocab_size).tobytes() + self.is_left_out.tobytes())
        for part in (self.ids, self.bias):
            digest.update(part.offsets.astype("<i8").tobytes() + part.ids.astype("<i4").tobytes())
            digest.update(b"" if part.values is None else part.values.astype("<f4").tobytes())


def mask_of(transition: Transition) -> SamplingMask | None:
    """Return the sampling masks of a recorded call's response tokens; None if there are none with the call, or no installed
    plugin reads them. Raises `DataError`, naming the call, for masks that are not of this response."""
    if not transition.constrained or not transition.extras:
        return None
    names = [name for name in plugins().names("masks") if name in transition.extras]
    if not names:
        for name in filter(_said.first, transition.extras):
            if plugins().brought("masks", name):
                log.warning(
                    "calls have sampling masks by %r, which no plugin reads here: they have the ratio 1, and other digests "
                    "than with the plugin.%s",
                    name,
                    plugins().cures("masks", name),
                )
        return None
    what = f"rollout {transition.rollout} attempt {transition.attempt} call {transition.seq}"
    try:
        mask = cast("Read", plugins().get("masks", names[0]))(transition)
    except DataError as error:
        raise DataError(f"{what} cannot be trained on: {error}") from error
    if len(mask) != len(transition.response_ids):
        flaw = f"it has sampling masks of {len(mask)} tokens and {len(transition.response_ids)} tokens"
    elif not (flaw := mask.flaw()) and not mask.keeps(np.asarray(transition.response_ids)).all():
        flaw = "its sampling mask leaves out a token that was drawn"
    if flaw:
        raise DataError(f"{what} cannot be trained on: {flaw}. Its record is damaged: leave the rollout out")
    return mask

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
EMPTY = np.zeros(2, np.int64), np.zeros(0, np.int32)
"""The offsets and the ids of one empty list, which all tokens without a mask share."""
NO_VALUES = np.zeros(0, np.float32)
LONG = 64
"""Lists of more ids are in a digest by their own digest, so that a list of many tokens is read once."""
log = logging.getLogger(__name__)
_said = Once()
Read = Callable[["Transition"], "SamplingMask"]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Ids of N tokens, of which many may share a list. Those of token i are list `which[i]` of L, in ascending order: list l is
    `ids[offsets[l]:offsets[l + 1]]`, with a number each in `values`, unless this is None."""

    which: Ints
    offsets: Ints
    ids: Ids
    values: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, chosen: Ints | slice) -> Ragged:
        """Return the ids of some tokens, in the order in which these are chosen. All lists are shared."""
        return Ragged(self.which[chosen], self.offsets, self.ids, self.values)

    @property
    def counts(self) -> Ints:
        """The number of ids of each token, shape (N,)."""
        found: Ints = np.diff(self.offsets)[self.which]
        return found

    def expanded(self) -> tuple[Ints, Ids, npt.NDArray[np.float32] | None]:
        """Return the token, the id and the number of each pair of a token and an id of its list, by token: arrays as large as
        all tokens' lists, so for few tokens at a time."""
        counts = self.counts
        ends = np.cumsum(counts)
        flat = np.repeat(self.offsets[self.which] - ends + counts, counts) + np.arange(counts.sum())
        tokens = np.repeat(np.arange(len(self)), counts)
        return tokens, self.ids[flat], None if self.values is None else self.values[flat]

    def holds(self, tokens: npt.NDArray[np.integer]) -> Bools:
        """Return whether each of `tokens` (N,) is among the ids of its list."""
        low, end = self.offsets[self.which], self.offsets[self.which + 1]
        high = end
        while (
            searched := low < high
        ).any():  # a binary search in all lists at once, which needs no keys of all their ids
            middle = (low + high) // 2
            less = np.zeros(len(self), np.bool_)
            less[searched] = self.ids[middle[searched]] < tokens[searched]
            low, high = np.where(less, middle + 1, low), np.where(searched & ~less, middle, high)
        found = low < end
        found[found] = self.ids[low[found]] == tokens[found]
        return found

    def is_ascending(self) -> bool:
        """Whether the ids of each list are in ascending order."""
        rises = self.ids[1:] > self.ids[:-1]
        starts = self.offsets[1:-1]
        rises[starts[(starts > 0) & (starts < len(self.ids))] - 1] = True
        return bool(rises.all())

    def update(self, digest: hashlib._Hash) -> None:
        """Add each token's ids and numbers to a digest, whatever lists tokens share: short lists whole, others by their own
        digest."""
        counts = self.counts
        digest.update(counts.astype("<i8").tobytes())
        is_long = counts > LONG
        _, ids, values = self[np.flatnonzero(~is_long)].expanded()
        digest.update(ids.astype("<i4").tobytes() + (b"" if values is None else values.astype("<f4").tobytes()))
        which = self.which[is_long]
        digests = {int(own): self._list_digest(int(own)) for own in np.unique(which)}
        digest.update(b"".join(map(digests.__getitem__, which.tolist())))

    def _list_digest(self, number: int) -> bytes:
        own = slice(self.offsets[number], self.offsets[number + 1])
        values = b"" if self.values is None else self.values[own].astype("<f4").tobytes()
        return hashlib.sha256(self.ids[own].astype("<i4").tobytes() + values).digest()

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the ids of all parts, one part behind another. Lists that parts share stay shared."""
        kept: dict[tuple[int, int], Ragged] = {}
        firsts, lists = dict[tuple[int, int], int](), 0
        which = []
        for part in parts:
            key = id(part.offsets), id(part.ids)
            if key not in kept:
                kept[key], firsts[key] = part, lists
                lists += len(part.offsets) - 1
            which.append(part.which + firsts[key])
        ends = np.cumsum([0, *(len(part.ids) for part in kept.values())])
        offsets = (part.offsets[1:] + end for part, end in zip(kept.values(), ends, strict=False))
        values = [part.values for part in kept.values() if part.values is not None]
        return cls(
            np.concatenate(which),
            np.concatenate([np.zeros(1, np.int64), *offsets]),
            np.concatenate([np.zeros(0, np.int32), *(part.ids for part in kept.values())]),
            np.concatenate(values) if values else None,
        )


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The sampling masks of N tokens, in a vocabulary of `vocab_size`.

    `ids` are those that were left out where `is_left_out` (N,) says so, and else those that were kept. A token that was drawn
    among all ids has left out none. `bias` has the ids to whose logits something was added, and what. Equal lists of a call
    are kept once, so that a mask is about as large as its record; only a block of tokens is ever expanded.
    """

    vocab_size: int
    is_left_out: Bools
    ids: Ragged
    bias: Ragged

    @classmethod
    def none(cls, count: int, vocab_size: int) -> SamplingMask:
        """Return the mask of `count` tokens that were drawn among all ids."""
        which = np.zeros(count, np.int64)
        return cls(vocab_size, np.ones(count, np.bool_), Ragged(which, *EMPTY), Ragged(which, *EMPTY, NO_VALUES))

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
        found: Bools = ~self.is_left_out | (self.ids.counts > 0) | (self.bias.counts > 0)
        return found

    def keeps(self, tokens: npt.NDArray[np.integer]) -> Bools:
        """Return whether each of `tokens` (N,) is in its own mask's kept ids."""
        found: Bools = self.ids.holds(tokens) != self.is_left_out
        return found

    def flaw(self) -> str:
        """Return why the ids cannot be those of its vocabulary; empty if they can."""
        for part in (self.ids, self.bias):
            if len(part.ids) and not 0 <= int(part.ids.min()) <= int(part.ids.max()) < self.vocab_size:
                return f"its sampling mask has ids outside of its own vocabulary of {self.vocab_size}"
            if not part.is_ascending():
                return "its sampling mask has ids that are not in ascending order"
        if self.bias.values is not None and not np.isfinite(self.bias.values).all():
            return "a logit bias of its sampling mask is not finite"
        return ""

    def update(self, digest: hashlib._Hash) -> None:
        """Add all that the mask says to a digest."""
        digest.update(np.int64(self.vocab_size).tobytes() + self.is_left_out.tobytes())
        self.ids.update(digest)
        self.bias.update(digest)


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

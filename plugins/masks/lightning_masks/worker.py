"""Notes in vLLM's worker among which ids each token is drawn, for requests that ask for it.

The invariant: the noted ids are exactly those whose logits are above minus infinity when vLLM draws the token, after all masks:
a grammar, allowed ids, bad words, the least length, min-p, top-k and top-p. What is sampled does not change. A step without a
request that asks computes nothing more.

vLLM 0.31 computes the logprobs that it returns (`--logprobs-mode processed_logprobs`) from the very logits that it draws from
(`Sampler.sample`); there the masks are read. Each mask travels behind the rank of its token's logprob, an array that vLLM sends
from the worker to its API with the token, and whose first number alone vLLM reads. So a mask comes with its token, in a stream
as in a whole answer. vLLM's own masks (`--return-sampling-mask`) are for a server as a whole, not for greedy calls, in the V2
model runner alone, and not in answers of its chat API.

Written for the V1 model runner of vLLM 0.31 and tested on a CPU; on others, and with speculative decoding, no mask is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import numpy as np

from lightning_masks.codes import ASKED, Codes

logger = logging.getLogger(__name__)

NEEDED = ("_sample", "sampler", "input_batch", "requests")
Rows = Mapping[int, bytes]
"""The codes of some rows of a step, by the row."""


def install(runner: Any) -> None:
    """Make a model runner send masks. A runner with other methods, and one that returns other logprobs, is left as it is."""
    if missing := [name for name in NEEDED if not hasattr(runner, name)]:
        logger.warning(
            "no sampling masks: the model runner %s has another form (no %s)", type(runner).__name__, missing[0]
        )
    elif getattr(runner.sampler, "logprobs_mode", "") != "processed_logprobs":
        logger.warning("no sampling masks: vLLM needs --logprobs-mode processed_logprobs")
    else:
        runner._sample = _noting(runner, runner._sample)  # noqa: SLF001 — vLLM has no other place for it


def _noting(runner: Any, sample: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_sample` whose logprobs carry the masks of the requests that ask for them."""
    _, tensors = _carrying()
    draw, known = runner.sampler.sample, Codes()

    @wraps(sample)
    def sampled(logits: Any, spec_decode_metadata: Any = None, *args: Any, **named: Any) -> Any:
        asking = _asking(runner) if spec_decode_metadata is None else []
        if not asking:
            return sample(logits, spec_decode_metadata, *args, **named)
        codes: dict[int, bytes] = {}
        size = 0

        def noting(*given: Any, **by_name: Any) -> Any:
            nonlocal size
            token_ids, logprobs = draw(*given, **by_name)
            if logprobs is not None:
                size = logprobs.shape[1]
                kept = (logprobs[asking] > -np.inf).cpu().numpy()
                codes.update((row, known.of(own)) for row, own in zip(asking, kept, strict=True))
            return token_ids, logprobs

        runner.sampler.sample = noting
        try:
            output = sample(logits, spec_decode_metadata, *args, **named)
        finally:
            del runner.sampler.sample  # the class's method shows again
        if codes and output.logprobs_tensors is not None:
            output.logprobs_tensors = tensors.carrying(output.logprobs_tensors, codes, size)
        return output

    return sampled


def _asking(runner: Any) -> list[int]:
    """Return the rows of the step whose requests ask for masks."""
    requests = runner.requests
    return [row for row, name in enumerate(runner.input_batch.req_ids) if _asks(requests[name].sampling_params)]


def _asks(params: Any) -> bool:
    return ASKED in (getattr(params, "extra_args", None) or ())


def behind(rank: int, vocab_size: int, code: bytes) -> Any:
    """Return a token's rank with its mask behind it, as uint32 numbers."""
    words = np.frombuffer(code + bytes(-len(code) % 4), "<u4")
    return np.concatenate([np.array([rank, vocab_size, len(code)], np.uint32), words]).astype(np.uint32)


def in_front(ranks: Any) -> tuple[int, bytes] | None:
    """Return the size of the vocabulary and the code behind a token's rank; None if there is none."""
    if len(ranks) < 3:
        return None
    return int(ranks[1]), np.asarray(ranks[3:], "<u4").tobytes()[: int(ranks[2])]


@cache
def _carrying() -> tuple[Any, Any]:
    """Return classes of a step's logprobs that also carry codes, derived from vLLM's own two: as lists and as tensors."""
    from vllm.v1.outputs import LogprobsLists, LogprobsTensors

    class Lists(LogprobsLists):  # type: ignore[misc]  # a class of vLLM's, known only where that is
        """The logprobs of a step's rows."""

        codes: Rows
        size: int

        def __reduce__(self) -> Any:
            return _lists, (tuple(self), self.codes, self.size)

        def slice_request(self, req_idx: int, num_positions: int) -> Any:
            """Return the logprobs of one row, with its mask."""
            found = super().slice_request(req_idx, num_positions)
            code = self.codes.get(req_idx)
            if code is None or num_positions != 1 or len(found.sampled_token_ranks) != 1:
                return found
            return found._replace(sampled_token_ranks=behind(int(found.sampled_token_ranks[0]), self.size, code))

    class Tensors(LogprobsTensors):  # type: ignore[misc]  # as above
        """The same before they are copied from the device."""

        codes: Rows
        size: int

        @classmethod
        def carrying(cls, values: Sequence[Any], codes: Rows, size: int) -> Tensors:
            """Return logprobs with codes."""
            made = cls(*values)
            made.codes, made.size = codes, size
            return made

        def tolists(self, *args: Any, **named: Any) -> Any:
            """Return the logprobs as lists, with the codes."""
            return _lists(super().tolists(*args, **named), self.codes, self.size)

        def to_cpu_nonblocking(self) -> Tensors:
            """Return the logprobs on their way to the CPU, with the codes."""
            return self.carrying(super().to_cpu_nonblocking(), self.codes, self.size)

    return Lists, Tensors


def _lists(values: Sequence[Any], codes: Rows, size: int) -> Any:
    """Return a step's logprobs as lists, with codes. A worker in a process of its own sends them so."""
    made = _carrying()[0](*values)
    made.codes, made.size = codes, size
    return made

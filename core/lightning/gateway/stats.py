"""Counts of what went through the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning.types import CallStatus, Transition


@dataclass(frozen=True, slots=True)
class GatewayStats:
    """A snapshot. `ok`, `aborted` and `error` count calls; `refused` requests that were answered with an error of the gateway's
    own; tokens are those vLLM reported (each choice's prompt counts); `held` requests wait for an update; `spans` were stored,
    `spans_rejected` belonged to no attempt that could take them."""

    ok: int = 0
    aborted: int = 0
    error: int = 0
    refused: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    in_flight: int = 0
    held: int = 0
    spans: int = 0
    spans_rejected: int = 0


class Counters:
    """The running totals behind `GatewayStats`."""

    def __init__(self) -> None:
        self.calls = dict.fromkeys(CallStatus, 0)
        self.refused = self.tokens_in = self.tokens_out = self.in_flight = 0
        self.spans = self.spans_rejected = 0

    def count(self, status: CallStatus, stored: Sequence[Transition] = ()) -> None:
        """One more call ended this way."""
        self.calls[status] += 1
        for transition in stored:
            self.tokens_in += len(transition.prompt_ids)
            self.tokens_out += len(transition.response_ids)

    def snapshot(self, held: int) -> GatewayStats:
        """The totals now."""
        return GatewayStats(
            ok=self.calls[CallStatus.OK],
            aborted=self.calls[CallStatus.ABORTED],
            error=self.calls[CallStatus.ERROR],
            refused=self.refused,
            tokens_in=self.tokens_in,
            tokens_out=self.tokens_out,
            in_flight=self.in_flight,
            held=held,
            spans=self.spans,
            spans_rejected=self.spans_rejected,
        )

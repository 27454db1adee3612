"""Which policy version sampled which token of the calls in flight.

The invariant: a token belongs to the version that was loaded when vLLM sampled it. A call starts with the version
current when it was sent; each update splits it at the number of tokens the old weights had sampled when vLLM froze. A call
of which that cannot be said is never trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning.gateway.dialects import Capture
from lightning.policy_server.protocol import Update
from lightning.types import VersionRun

if TYPE_CHECKING:
    from lightning.gateway.upstream.servers import Slot, Upstream


@dataclass(slots=True, eq=False)
class LiveCall:
    """A call that vLLM may still be sampling.

    `request_id` is what was sent as `X-Request-Id`, `choices` how many completions it makes (`n` for each prompt), `sent`
    says that it reached a server (`upstream`, which was in `slot` then), `seen` how many tokens of each choice had come before
    the last hold. `unsure` calls may have tokens of versions that nobody here has heard of; `unserved` ones failed because no
    server was there, or theirs went away. While `waits_for_bytes`, the last sign of life was at `heard_at` (the loop's clock).
    """

    request_id: str
    choices: int
    n: int
    base: int
    capture: Capture
    runs: dict[int, list[VersionRun]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    sent: bool = False
    unsure: bool = False
    unserved: bool = False
    slot: Slot | None = None
    upstream: Upstream | None = None
    waits_for_bytes: bool = False
    heard_at: float = 0.0

    def dispatch(self, version: int, now: float) -> None:
        """It is being sent to a server that has this version."""
        self.base, self.sent, self.unsure = version, True, False
        self.waits_for_bytes, self.heard_at = True, now
        self.runs.clear()
        self.seen.clear()

    @property
    def replaced(self) -> bool:
        """Whether another server, maybe at the same address, is now in the place of the one that it was sent to."""
        return self.slot is not None and self.slot.upstream is not self.upstream

    def versions(self, choice: int, length: int) -> tuple[VersionRun, ...]:
        """The runs of a choice, clipped to its `length` response tokens."""
        runs = self.runs.get(choice)
        if runs is None:
            return (VersionRun(0, self.base),)
        return (runs[0], *(run for run in runs[1:] if run.start < length))

    def key(self, index: int) -> str:
        """How `Update.in_flight` names a choice (the inverse of `policy_server.control.client_key`)."""
        prompt, choice = divmod(index, self.n)
        if self.n == 1:
            return self.request_id if prompt == 0 else f"{prompt}_{self.request_id}"
        return f"{choice}_{self.request_id}" + (f"-{prompt}" if prompt else "")

    def split(self, choice: int, tokens: int, version: int) -> None:
        """From response token `tokens` on, `choice` is sampled by `version`."""
        runs = self.runs.setdefault(choice, [VersionRun(0, self.base)])
        while runs and runs[-1].start >= tokens:
            runs.pop()
        runs.append(VersionRun(tokens if runs else 0, version))


class VersionBook:
    """The current version, and every call that could be touched by the next update."""

    def __init__(self, version: int) -> None:
        self.current = version
        self._live: set[LiveCall] = set()

    @property
    def idle(self) -> bool:
        """Whether there is no such call."""
        return not self._live

    def follow(self, call: LiveCall) -> None:
        """From now on updates concern this call."""
        self._live.add(call)

    def forget(self, call: LiveCall) -> None:
        """The call's answer has been read, and no update is under way."""
        self._live.discard(call)

    def freeze(self) -> None:
        """Note how far every call has come, before an update begins."""
        for call in self._live:
            call.seen = {index: len(choice.response_ids) for index, choice in call.capture.choices.items()}

    def keys(self) -> list[str]:
        """How `Update.in_flight` names every choice that a server may be sampling."""
        return [call.key(index) for call in self._live if call.sent for index in range(call.choices)]

    def lose(self) -> int:
        """Weights may have changed unheard of: whatever a server may be sampling is unsure. Return how many calls that are."""
        lost = [call for call in self._live if call.sent and not call.unsure]
        for call in lost:
            call.unsure = True
        return len(lost)

    def update(self, update: Update) -> None:
        """Split the calls in flight at the tokens the old weights had sampled.

        A choice that is missing from `in_flight` was never scheduled before the update and is wholly the new version's;
        unless tokens of it had been seen by then, which a server that does not report finished requests leaves out.
        """
        self.current = update.version
        for call in self._live:
            if not call.sent:
                continue
            for index in range(call.choices):
                tokens = update.in_flight.get(call.key(index))
                if tokens is not None or not call.seen.get(index):
                    call.split(index, tokens or 0, update.version)

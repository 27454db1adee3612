"""The tap on an HTTP client that only one framework has: its adapter asks here what a request has to carry.

The invariant: as that of the tap on httpx; a request to anywhere but the gateway of an active rollout carries nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

from lightning.instrument.httpx_patch import HttpxRequest, HttpxResponse, Sent, answered, mark
from lightning.instrument.other_clients import PlainUrl

Headers = Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class MarkedRequest:
    """A request about to be sent. `added` are the headers that it needs besides its own."""

    added: Mapping[str, str]
    _sent: Sent | None

    def answered(self, status: int, headers: Headers) -> None:
        """Tell that it was answered, once the head of the reply is there: rewards and tool runs then follow this call."""
        if self._sent is not None:
            had = {name.lower(): value for name, value in headers}
            answered(self._sent, cast("HttpxResponse", SimpleNamespace(status_code=status, headers=had)))


def mark_request(url: str, headers: Headers) -> MarkedRequest:
    """Say what a request with these headers has to carry, asked in the thread or task that is about to send it."""
    had = {name.lower(): value for name, value in headers}
    try:
        request = SimpleNamespace(url=PlainUrl(url), headers=dict(had))
    except ValueError:  # no URL, as the client itself will say
        return MarkedRequest({}, None)
    sent = mark(cast("HttpxRequest", request))
    return MarkedRequest({name: value for name, value in request.headers.items() if had.get(name) != value}, sent)

"""What the control API answers when it says no.

The invariant: an `ApiError` carries everything of its answer: the status, a machine's word for what is wrong, and a message for
people that names the culprit and the cure.
"""

from __future__ import annotations

from collections.abc import Mapping


class ApiError(Exception):
    """A request that is refused. Raised anywhere below a route, turned into an answer once, at the route."""

    def __init__(self, status: int, type: str, message: str, headers: Mapping[str, str] | None = None) -> None:  # noqa: A002
        super().__init__(message)
        self.status, self.type, self.message = status, type, message
        self.headers = dict(headers or {})

"""What one client may take of a server's port."""

from __future__ import annotations

from pydantic import Field

from lightning.config.section import Section


class LimitsConfig(Section):
    """What one client may take of a port. Who asks too often is told to wait (429), who is too slow is cut off (408)."""

    hosts: tuple[str, ...] = ()
    """Names under which the port may be asked for, besides those of loopback: the name of a proxy before it. A port that is
    bound beyond loopback insists on names only when some are given here."""
    header_timeout: float = Field(default=20.0, gt=0)
    """Seconds from a connection's (or request's) beginning until the request's headers must be complete."""
    body_timeout: float = Field(default=60.0, gt=0)
    """Seconds from the headers until the request's body must be complete."""
    write_timeout: float = Field(default=120.0, gt=0)
    """Seconds for which a client may leave what was sent to it unread before its connection is cut."""
    requests_per_second: float = Field(default=2000.0, ge=0)
    """Requests of one token, on the average; twice as many may come at once. 0 sets no limit."""
    concurrent_requests: int = Field(default=2048, ge=0)
    """Requests of one token that may be in progress, those that wait for news included. 0 sets no limit."""
    failures_per_minute: float = Field(default=120.0, ge=0)
    """Refusals of wrong tokens to one address; beyond it only tokens that were let in before are. 0 sets no limit."""

"""What one client may take of a server's port."""

from __future__ import annotations

from pydantic import Field

from lightning.config.section import Section


class LimitsConfig(Section):
    """What one client may take of a port. Who asks too often is told to wait (429), who is too slow is cut off (408)."""

    hosts: tuple[str, ...] = ()
    """Accepted host names of requests, in addition to loopback: for example the name of a proxy in front. A port that is
    bound beyond loopback checks names only when some are given here."""
    header_timeout: float = Field(default=20.0, gt=0)
    """Time limit in seconds from the start of a connection (or request) until the request's headers are complete."""
    body_timeout: float = Field(default=60.0, gt=0)
    """Time limit in seconds from the headers until the request's body is complete."""
    write_timeout: float = Field(default=120.0, gt=0)
    """Seconds that a client may leave sent data unread; then its connection is closed."""
    requests_per_second: float = Field(default=2000.0, ge=0)
    """Average rate of requests per token; bursts may be twice as large. 0 sets no limit."""
    concurrent_requests: int = Field(default=2048, ge=0)
    """Maximum of concurrent requests per token, long polls included. 0 sets no limit."""
    failures_per_minute: float = Field(default=120.0, ge=0)
    """Requests with wrong tokens per address and minute. Above the limit, only tokens that were accepted before are accepted. 0
    sets no limit."""

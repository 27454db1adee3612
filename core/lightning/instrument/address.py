"""Where a rollout's gateway is, and whether a request goes there.

The invariant: addresses are compared as the client that sends the request reads them (capitals, default ports, names beyond
ASCII), by parsing the gateway's with the client's own class, once for each.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

PORTS = {"http": 80, "https": 443}


class Url(Protocol):
    """What httpx's and httpx2's URLs have in common."""

    def __init__(self, url: str) -> None: ...

    @property
    def scheme(self) -> str:
        """In lower case."""

    @property
    def raw_host(self) -> bytes:
        """In lower case, and as IDNA."""

    @property
    def port(self) -> int | None:
        """None when it is the scheme's own."""

    @property
    def netloc(self) -> bytes:
        """Host and port, as in the header `host`."""

    @property
    def raw_path(self) -> bytes:
        """With the query."""


Place: TypeAlias = tuple[tuple[str, bytes, int | None], bytes]
"""The server, and what is asked of it."""


def place_of(url: Url) -> Place:
    """What of a URL decides where a request goes."""
    scheme = url.scheme
    return (scheme, url.raw_host, url.port or PORTS.get(scheme)), url.raw_path


class Address:
    """The root of a gateway, from the base URL that agents have of it."""

    def __init__(self, base_url: str) -> None:
        # A slash at its end, so that /lightning is not a prefix of /lightning2.
        self._root = base_url.rstrip("/").removesuffix("/v1").rstrip("/") + "/"
        self._parsed: dict[type[Url], Place] = {}

    def covers(self, kind: type[Url], place: Place) -> bool:
        """Whether a URL of this class, at this place, is the gateway's."""
        own = self._parsed.get(kind)
        if own is None:
            own = self._parsed[kind] = place_of(kind(self._root))
        return own[0] == place[0] and place[1].startswith(own[1])

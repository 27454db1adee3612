"""Store URLs: `memory://`, `sqlite:///relative.db?sync=full`, `sqlite:////absolute/path.db`, and what plugins add.

The invariant: what cannot be meant is refused here, with the cure, before any file is touched; unknown options never pass, and
no error holds a password.
Three slashes start a relative path and four an absolute one, as in SQLAlchemy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

from lightning.errors import ConfigError

_PASSWORD = re.compile(r"([?&](?:\w*password|passwd|token|secret)=)[^&#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoreURL:
    """The parts of a store URL. `path` has lost its leading slash: absolute if it still starts with one."""

    scheme: str
    host: str = ""
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def check_options(self, known: Sequence[str]) -> None:
        """Raise `ConfigError` for an option that is not in `known`, with the nearest known one."""
        for option in self.options:
            if option not in known:
                near = difflib.get_close_matches(option, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ConfigError(
                    f"unknown option {option!r} in the {self.scheme} store URL{hint} Known: {', '.join(known) or 'none'}"
                )


def split_userinfo(url: str) -> tuple[str, str]:
    """`scheme://user:password@host/...` as `("user:password", "scheme://host/...")`, the first part still quoted.

    An @ after the first / or ? belongs to the path or the options.
    """
    scheme, separator, rest = url.partition("://")
    end = _end_of_host(rest)
    userinfo, _, host = rest[:end].rpartition("@")
    return (userinfo, f"{scheme}{separator}{host}{rest[end:]}") if userinfo else ("", url)


def redacted(url: str) -> str:
    """The URL as errors and pages may show it: `***@` in the place of user and password, `***` for a password option.

    Where a password may go on behind a / or ?, all before the last @ is hidden, or all of it where an option may be what that @
    is in: a part too many does no harm.
    """
    userinfo, rest = split_userinfo(url)
    if _is_unclear(url):
        hidden, _, after = url.rpartition("@")
        scheme, separator, _ = url.partition("://")
        rest = f"{scheme}{separator}***" if separator else "***"
        rest += "" if _PASSWORD.search(hidden) else f"@{after}"
    elif userinfo:
        rest = rest.replace("://", "://***@", 1)
    return _PASSWORD.sub(r"\1***", rest)


def parse(url: str) -> StoreURL:
    """Take a store URL apart. Raises `ConfigError` when it has no scheme, when it has an @ where a password with a / or ? would
    end, or when an option is malformed or repeated."""
    scheme, separator, rest = url.partition("://")
    shown = redacted(url)
    if not separator or not scheme:
        raise ConfigError(
            f"{shown!r} is not a store URL: write scheme://..., for example sqlite:///runs/lightning.db or memory://"
        )
    if _is_unclear(url):
        raise ConfigError(
            f"store URL {shown!r} has an @ behind a / or ?, so that a password may go on behind them: write %2F for a / of the "
            "password, %3F for a ?, and %40 for an @ that does not begin the host"
        )
    location, _, query = rest.partition("?")
    host, slash, path = location.partition("/")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"the options of store URL {shown!r} are malformed: write ?name=value&...") from error
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigError(f"store URL {shown!r} sets an option twice: keep one of them")
    return StoreURL(scheme.lower(), unquote(host), unquote(path) if slash else "", options)


def _end_of_host(rest: str) -> int:
    """Where what stands behind `://` has its first / or ?."""
    return min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))


def _is_unclear(url: str) -> bool:
    """Whether an @ stands where a password with a / or ? in it would end. A file has no password, and any path."""
    scheme, separator, rest = url.partition("://")
    if not separator:  # no URL, but somebody may have meant one
        return "@" in url.partition(":")[2]
    return scheme.lower() != "sqlite" and "@" in rest[_end_of_host(rest) :]


def sqlite_url(path: str | Path, *, sync: str = "") -> str:
    """The URL of an SQLite file, whatever characters its path has."""
    options = f"?sync={quote(sync)}" if sync else ""
    return f"sqlite:///{quote(str(path))}{options}"

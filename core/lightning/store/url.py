"""Store URLs: `memory://`, `sqlite:///relative.db?sync=full`, `sqlite:////absolute/path.db`, and what plugins add.

The invariant: a malformed URL or an unknown option is refused, with the cure, before any file is touched. No error contains a
password. Three slashes start a relative path and four an absolute one, as in SQLAlchemy.
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
    """The parts of a store URL. `path` is without the slash behind the host, so it is absolute if it begins with a slash."""

    scheme: str
    host: str = ""
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def check_options(self, known: Sequence[str]) -> None:
        """Raise `ConfigError` for an option that is not in `known`; it names the nearest known option."""
        for option in self.options:
            if option not in known:
                near = difflib.get_close_matches(option, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ConfigError(
                    f"unknown option {option!r} in the {self.scheme} store URL{hint} Known: {', '.join(known) or 'none'}"
                )


def split_userinfo(url: str) -> tuple[str, str]:
    """Split `scheme://user:password@host/...` into `("user:password", "scheme://host/...")`; the first part stays quoted.

    An @ after the first / or ? belongs to the path or the options.
    """
    scheme, separator, rest = url.partition("://")
    end = _end_of_host(rest)
    userinfo, _, host = rest[:end].rpartition("@")
    return (userinfo, f"{scheme}{separator}{host}{rest[end:]}") if userinfo else ("", url)


def redacted(url: str) -> str:
    """Return a URL that errors and pages may show: with `***@` in place of user and password, and `***` in place of an option's
    password.

    If a password may contain a / or ?, everything before the last @ is hidden; everything is hidden if an option before the
    last @ may be a password.
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
    """Return the parts of a store URL. Raises `ConfigError` for a URL without a scheme, with an @ that may end a password with
    a / or ?, or with a malformed or repeated option."""
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
    """Return the index of the first / or ? in `rest`, the part of a URL behind `://`; its length if there is none."""
    return min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))


def _is_unclear(url: str) -> bool:
    """Return whether an @ behind a / or ? may be the end of a password. It is not in the URL of an SQLite file, which has no
    password."""
    scheme, separator, rest = url.partition("://")
    if not separator:  # no URL, but perhaps a mistyped one
        return "@" in url.partition(":")[2]
    return scheme.lower() != "sqlite" and "@" in rest[_end_of_host(rest) :]


def sqlite_url(path: str | Path, *, sync: str = "") -> str:
    """Return the URL of an SQLite file, quoted if needed. `sync` is its option; empty for the default."""
    options = f"?sync={quote(sync)}" if sync else ""
    return f"sqlite:///{quote(str(path))}{options}"

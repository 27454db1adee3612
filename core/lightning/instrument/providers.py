"""Addresses of calls: whether a request goes to the rollout's gateway, and the address that it would have without lightning, by
the addresses and keys that the process's environment had before lightning changed it.

The invariant: a call that is not for the policy (embeddings, moderations, files) goes where it would have gone without
lightning, with the process's own key, and never gets a rollout's key. A client that is made while the agent's modules are
imported gets an address that leads nowhere, so that its calls belong to the rollout in which they are made. URLs are compared
as the sending client reads them (capitals, default ports, names beyond ASCII): the gateway's address is parsed with the
client's own URL class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, TypeAlias

NOWHERE: Final = "policy.lightning.invalid"
"""The host in the address of clients that are made before any rollout; names below `invalid` never resolve (RFC 2606)."""
NO_KEY: Final = "made-before-the-rollout"
"""The key of such a client if the process has no key of its own; without any key a client cannot be made."""
ADDRESSES: Final = {
    "OPENAI_BASE_URL": f"http://{NOWHERE}/v1",
    "OPENAI_API_BASE": f"http://{NOWHERE}/v1",
    "ANTHROPIC_BASE_URL": f"http://{NOWHERE}",
    "AZURE_OPENAI_ENDPOINT": f"http://{NOWHERE}",
}
KEYS: Final = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AZURE_OPENAI_API_KEY")
LOGINS: Final = frozenset(
    {
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_CUSTOM_HEADERS",
        "ANTHROPIC_PROFILE",
        "CLAUDE_CODE_OAUTH_TOKEN",
        "CODEX_API_KEY",
    }
    | {"CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"}
    | {"OPENAI_ADMIN_KEY", "OPENAI_CUSTOM_HEADERS"}
    | {"OPENAI_ORGANIZATION", "OPENAI_ORG_ID", "OPENAI_PROJECT", "OPENAI_PROJECT_ID"}
)
"""Variables with logins, accounts and services that the clients of OpenAI and Anthropic use with a key or instead of one. The
policy has none of these, so every runner removes them."""
ONLY_CHANGED: Final = frozenset({"OPENAI_API_BASE", "AZURE_OPENAI_ENDPOINT"})
"""Variables that are changed only if the process has them, because frameworks choose another client if they are set."""
OPENAI, ANTHROPIC = "https://api.openai.com/v1", "https://api.anthropic.com"
POLICY_ROUTES: Final = ("chat/completions", "completions", "responses", "messages", "models", "traces")
"""The routes that the gateway itself answers, below `/v1/`."""

_original: dict[str, str] = {}


def for_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set while an agent's modules are imported: addresses that lead nowhere, and keys if there are
    none."""
    addresses = {name: url for name, url in ADDRESSES.items() if name not in ONLY_CHANGED or environment.get(name)}
    wanted = [name for name in KEYS if name != "AZURE_OPENAI_API_KEY" or "AZURE_OPENAI_ENDPOINT" in addresses]
    return {**addresses, **{name: NO_KEY for name in wanted if not environment.get(name)}}


def for_rollout(base_url: str, api_key: str) -> dict[str, str | None]:
    """Return the variables that the clients of OpenAI and Anthropic read by themselves, for a rollout: its address and key, and
    None for variables that must not be set. Every runner sets these for its agents."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # Anthropic's client adds it
        "ANTHROPIC_API_KEY": api_key,
        **dict.fromkeys(LOGINS),
    }


def own(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the providers' addresses and keys in an environment, for `remember`."""
    return {name: value for name in (*ADDRESSES, *KEYS) if (value := environment.get(name))}


def remember(original: Mapping[str, str]) -> None:
    """Keep the addresses and keys that the process had of its own (`own`), for `elsewhere`."""
    _original.clear()
    _original.update(original)


def is_policys(route: str) -> bool:
    """Whether a path below `/v1/` is one of the routes that the gateway itself answers, such as a call of the policy."""
    path = route.partition("?")[0]
    return any(path == known or path.startswith(f"{known}/") for known in POLICY_ROUTES)


def elsewhere(route: str, *, anthropic: bool, azure: str = "") -> tuple[str, dict[str, str]] | None:
    """Return the URL that a path below `/v1/` would have without lightning, and the header with the process's own key; None if
    the process has no key. `anthropic` says that Anthropic's client sends it. `azure` is the whole path of a request by Azure's
    client, which goes to the process's own Azure resource if it has one."""
    if azure and (endpoint := _original.get("AZURE_OPENAI_ENDPOINT")):
        key = _original.get("AZURE_OPENAI_API_KEY", "")
        return (f"{endpoint.rstrip('/')}/{azure}", {"api-key": key}) if key else None
    if anthropic:
        key = _original.get("ANTHROPIC_API_KEY", "")
        base = _original.get("ANTHROPIC_BASE_URL", ANTHROPIC).rstrip("/")
        return (f"{base}/v1/{route}", {"x-api-key": key}) if key else None
    key = _original.get("OPENAI_API_KEY", "")
    base = (_original.get("OPENAI_BASE_URL") or _original.get("OPENAI_API_BASE") or OPENAI).rstrip("/")
    return (f"{base}/{route}", {"authorization": f"Bearer {key}"}) if key else None


PORTS = {"http": 80, "https": 443}


class Url(Protocol):
    """The attributes of httpx's and httpx2's URLs that are used here."""

    def __init__(self, url: str) -> None: ...

    @property
    def scheme(self) -> str:
        """The scheme in lower case."""

    @property
    def raw_host(self) -> bytes:
        """The host in lower case, encoded as IDNA."""

    @property
    def port(self) -> int | None:
        """The port; None if it is the scheme's default."""

    @property
    def netloc(self) -> bytes:
        """Host and port, as in the header `host`."""

    @property
    def raw_path(self) -> bytes:
        """The path with the query."""


Place: TypeAlias = tuple[tuple[str, bytes, int | None], bytes]
"""The server (scheme, host, port), and the path with the query."""


def place_of(url: Url) -> Place:
    """Return the parts of a URL that decide where a request goes."""
    scheme = url.scheme
    return (scheme, url.raw_host, url.port or PORTS.get(scheme)), url.raw_path


class Address:
    """The root URL of a gateway, made from the base URL that agents get."""

    def __init__(self, base_url: str) -> None:
        # A slash at its end, so that /lightning is not a prefix of /lightning2.
        self._root = base_url.rstrip("/").removesuffix("/v1").rstrip("/") + "/"
        self._parsed: dict[type[Url], Place] = {}

    def covers(self, kind: type[Url], place: Place) -> bool:
        """Whether the URL with this class and place is one of the gateway."""
        own = self._parsed.get(kind)
        if own is None:
            own = self._parsed[kind] = place_of(kind(self._root))
        return own[0] == place[0] and place[1].startswith(own[1])

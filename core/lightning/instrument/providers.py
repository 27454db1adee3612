"""Where calls go: whether a request goes to the rollout's gateway, and where it would have gone without us, by the addresses
and keys that the process's environment had before ours.

The invariant: what is not a call of the policy's (embeddings, moderations, files) goes where it would have gone, with the
process's own key, and a rollout's key never goes there. A client that is made while the agent's modules are imported has an
address that leads nowhere, so that its calls belong to the rollout in which they are made. Addresses are compared as the client
that sends the request reads them (capitals, default ports, names beyond ASCII), by parsing the gateway's with the client's own
class, once for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, TypeAlias

NOWHERE: Final = "policy.lightning.invalid"
"""The host that clients have which are made before any rollout; names below `invalid` are nobody's (RFC 2606)."""
NO_KEY: Final = "made-before-the-rollout"
"""The key of such a client where the process has none of its own; without any a client cannot be made."""
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
"""Logins, accounts and services that the clients of OpenAI and Anthropic take beside a key or before it: the policy has none of
these, so that every runner takes them out."""
ONLY_CHANGED: Final = frozenset({"OPENAI_API_BASE", "AZURE_OPENAI_ENDPOINT"})
"""Set only where the process has them: frameworks take another client where they find them."""
OPENAI, ANTHROPIC = "https://api.openai.com/v1", "https://api.anthropic.com"
POLICY_ROUTES: Final = ("chat/completions", "completions", "responses", "messages", "models", "traces")
"""What is the gateway's own, below `/v1/`."""

_original: dict[str, str] = {}


def for_import(environment: Mapping[str, str]) -> dict[str, str]:
    """What to set while an agent's modules are imported: addresses that lead nowhere, and keys where there are none."""
    addresses = {name: url for name, url in ADDRESSES.items() if name not in ONLY_CHANGED or environment.get(name)}
    wanted = [name for name in KEYS if name != "AZURE_OPENAI_API_KEY" or "AZURE_OPENAI_ENDPOINT" in addresses]
    return {**addresses, **{name: NO_KEY for name in wanted if not environment.get(name)}}


def for_rollout(base_url: str, api_key: str) -> dict[str, str | None]:
    """What the clients of OpenAI and Anthropic read by themselves, for a rollout: its address and key, and None for what must
    not be set. Every runner gives its agents these."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # their client adds it
        "ANTHROPIC_API_KEY": api_key,
        **dict.fromkeys(LOGINS),
    }


def own(environment: Mapping[str, str]) -> dict[str, str]:
    """The addresses and keys of an environment, for `remember`."""
    return {name: value for name in (*ADDRESSES, *KEYS) if (value := environment.get(name))}


def remember(original: Mapping[str, str]) -> None:
    """These were the process's own (`own`)."""
    _original.clear()
    _original.update(original)


def is_policys(route: str) -> bool:
    """Whether a path below `/v1/` is a call of the policy's, or another of the gateway's own."""
    path = route.partition("?")[0]
    return any(path == known or path.startswith(f"{known}/") for known in POLICY_ROUTES)


def elsewhere(route: str, *, anthropic: bool, azure: str = "") -> tuple[str, dict[str, str]] | None:
    """The URL that a path below `/v1/` would have had without us, and the header with the process's own key; None where it
    has no key. `azure` is the whole path of a client of Azure's, which goes to the process's own resource if it has one."""
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

"""How clients go to a host without a proxy.

The invariant: what the user has said of proxies stays, and a host with a public name is reached as they said.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from lightning.addresses import leads_to_itself


def without_proxy(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """`NO_PROXY` and `no_proxy` with the host of `url` after what the user has there; nothing where there is no proxy.

    A proxy cannot reach a gateway on loopback or in a private network, and none is to see the keys of rollouts. One that has a
    public name may be reached through the proxy alone, and stays as it is.
    """
    # Either variable would also hide the proxy of macOS's settings.
    if not any(
        value and name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name, value in environment.items()
    ):
        return {}
    host = urlsplit(url).hostname or ""
    if not (host and (leads_to_itself(url) or _is_private(host))):
        return {}
    both = {}
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):  # clients that know both prefer either
        theirs = environment.get(name) or environment.get(other) or ""
        listed = [each.strip() for each in theirs.split(",") if each.strip()]
        # urllib knows "*" only when it stands alone
        both[name] = theirs if "*" in listed else ",".join(dict.fromkeys((*listed, host)))
    return both


def _is_private(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return False

"""Which hosts are this machine's own."""

from __future__ import annotations

import pytest
from lightning.addresses import is_loopback, leads_to_itself


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("LocalHost", True),
        ("ip6-localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.7", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_what_loopback_is(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.1.2.3", True),
        ("http://[::1]:8000", True),
        ("http://localhost:8000", True),
        ("http://ip6-localhost:8000", True),
        ("http://a.localhost", True),
        ("http://0.0.0.0:8000", True),
        ("http://[::]:8000", True),
        ("nonsense", True),
        ("https://10.0.0.7:8000", False),
        ("http://[fd00::1]:80", False),
        ("http://lightning.agents.svc:8000", False),
    ],
)
def test_what_leads_another_machine_to_itself(url: str, loopback: bool) -> None:
    assert leads_to_itself(url) is loopback

"""The port that clients know, of a trainer that opens one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from lightning.errors import GatewayError

from tests.core.trainer.test_opening import House, house  # noqa: F401 — a fixture


async def test_a_taken_port_is_said_before_anything_is_started(house: House, tmp_path: Path) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(GatewayError, match=r"in use.*server\.port"):
            await house.open(tmp_path, restores=False, **{"server.port": other.getsockname()[1]})
        assert house.policy.notice is None, "nothing was started"

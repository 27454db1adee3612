"""A gateway talks to the policy servers that trainers name in the store, where they are allowed, and to no others."""

from __future__ import annotations

import pytest
from aiohttp import web
from lightning.addresses import Allowed
from lightning.gateway import Upstream
from lightning.store import Store
from lightning_server.fleet.member import Member
from lightning_server.fleet.records import Notice, Stance

from tests.core.security.conftest import store  # noqa: F401 — a fixture
from tests.core.security.test_upstreams import listening


async def test_an_address_in_the_store_that_is_not_allowed_is_never_connected_to(
    store: Store,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []

    async def hear(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response()

    async with listening(hear) as url:
        notice = Notice("owner", 1, Stance.OPEN, 1, 1, (Upstream(url, "m"), Upstream("http://8.8.8.8", "m")))
        strict = Member(store, "run", 1.0, allowed=Allowed(["gpu-7"]))
        for _ in range(3):
            strict._serve(notice)
        assert strict.policy.pool.slots == []
        assert asked == []
        member = Member(store, "run", 1.0, allowed=Allowed(["loopback", "8.8.8.8"]))
        member._serve(notice)
        assert [slot.upstream for slot in member.policy.pool.slots] == list(notice.servers)
    assert caplog.text.count("gateway.allowed_upstreams") == 1, "said once"

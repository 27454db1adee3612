"""What a trainer tells the gateways of other servers about its policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.errors import PolicyServerError
from lightning.gateway.policy import UNKNOWN
from lightning_server.fleet.records import Notice, Stance, notice_of


async def notice(house: Any) -> Notice:
    found = await notice_of(house.store, "run")
    assert found is not None
    return found


async def test_where_the_policy_is_served_and_each_new_version(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path) as house:
        stack = house.loop.stack
        begun = await notice(house)
        assert (begun.stance, begun.version, list(begun.servers)) == (Stance.OPEN, 0, stack.upstreams())
        house.engine.weights(tmp_path / "w")
        await stack.update(tmp_path / "w", 1)
        updated = await notice(house)
        assert (updated.stance, updated.version, updated.epoch) == (Stance.OPEN, 1, begun.epoch + 1)
        await stack.owner.close()
        assert (await notice(house)).servers == ()


async def test_a_refused_update_leaves_the_old_version(bench: Any, tmp_path: Path, monkeypatch: Any) -> None:
    async with bench(tmp_path) as house:

        async def refuse(*_: object) -> None:
            raise PolicyServerError("the file does not fit")

        monkeypatch.setattr(house.policy, "update", refuse)
        with pytest.raises(PolicyServerError):
            await house.loop.stack._update(tmp_path / "w", 1, None)
        assert ((await notice(house)).version, (await notice(house)).stance) == (0, Stance.OPEN)


async def test_an_update_that_broke_off_is_a_version_that_nobody_knows(
    bench: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """The weights were loaded, then the probe was not answered; or the trainer was interrupted."""
    async with bench(tmp_path) as house:

        async def load_and_fail(weights: Path, version: int, probe: object) -> None:
            house.policy.version = version
            raise PolicyServerError("the probe was not answered")

        async def crash(*_: object) -> None:
            raise KeyboardInterrupt

        for update, error in ((load_and_fail, PolicyServerError), (crash, KeyboardInterrupt)):
            monkeypatch.setattr(house.policy, "update", update)
            house.policy.version = 0
            with pytest.raises(error):
                await house.loop.stack._update(tmp_path / "w", 1, None)
            assert (await notice(house)).version == UNKNOWN


async def test_a_restarted_policy_server_is_told_with_its_new_address(
    bench: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    async with bench(tmp_path) as house:
        stack = house.loop.stack
        monkeypatch.setattr(
            type(house.policy), "alias", property(lambda self: "new" if self.restarted_with >= 0 else "tiny")
        )
        (old,) = stack.upstreams()
        await stack.owner.away(old)
        assert (await notice(house)).stance is Stance.PAUSED
        await house.policy.restart(None, 0)
        await stack.owner.back(old, *stack.upstreams(), 0)
        said = await notice(house)
        assert (said.stance, said.version, [server.model for server in said.servers]) == (Stance.OPEN, 0, ["new"])

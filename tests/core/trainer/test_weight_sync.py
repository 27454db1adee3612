"""What is handed to the policy server: adapters alone to a vLLM of ours that reads files, else whole weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import PolicyServerError
from lightning.policy_server.protocol import Probe, Update


@pytest.mark.parametrize(
    ("settings", "adapters", "written"),
    [
        ({}, True, "adapters"),
        ({"policy_server__weight_transfer": "file"}, True, "adapters"),
        ({"policy_server__weight_transfer": "gloo"}, True, "whole"),
        ({"policy_server__attach": "http://127.0.0.1:9"}, True, "whole"),
        ({}, False, "whole"),  # an engine whose model is stored otherwise
    ],
)
async def test_adapters_go_alone_where_vllm_can_merge_them(
    bench: Any, tmp_path: Path, settings: dict[str, str], adapters: bool, written: str
) -> None:
    async with bench(tmp_path, **settings) as made:
        did: list[str] = []
        whole = made.engine.weights

        def weights(file: Path) -> Path:
            did.append("whole")
            result: Path = whole(file)
            return result

        def only(file: Path) -> Path | None:
            if not adapters:
                return None
            did.append("adapters")
            result: Path = whole(file)
            return result

        made.engine.weights, made.engine.adapters = weights, only
        await made.loop.publish()
        assert did == [written]
        assert len(await made.loop.publisher.digest()) == 64


async def test_an_update_fails_if_no_server_answers_for_a_policy_that_is_probed(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as made:
        update = made.policy.update

        async def elsewhere(weights: Path | None, version: int, probes: Sequence[Probe] = ()) -> Update:
            found: Update = await update(weights, version, probes)
            return replace(found, served=[[] for _ in probes])

        made.loop.publisher.prober.recall([1, 2, 3, 4], [5, 6, 7], "critic")
        monkeypatch.setattr(made.policy, "update", elsewhere)
        with pytest.raises(PolicyServerError, match="no policy server answers for the policy 'critic'"):
            await made.loop.publish()

"""What a step's requests needed: metrics, and when it is worth a warning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from lightning.batch.trajectory import Group
from lightning.policy_server.protocol import PolicyServer, Usage
from lightning.trainer.metrics import UsageMeter

PAIR = [Group("g", cast("Any", ("one", "other")))]


class Server:
    """Says what it is told to, under names that change with each start."""

    claim, version = "", 0

    def __init__(self, *answers: Usage | None, aliases: Sequence[str] = ()) -> None:
        self.answers, self.aliases = list(answers), list(aliases)

    @property
    def alias(self) -> str:
        return self.aliases.pop(0) if self.aliases else "policy"

    async def usage(self) -> Usage | None:
        return self.answers.pop(0)


def meter(*answers: Usage | None) -> UsageMeter:
    return UsageMeter([cast("PolicyServer", Server(*answers))])


async def test_each_step_has_what_came_since_the_last() -> None:
    found = meter(Usage(2, 100, 50), None, Usage(6, 300, 200, 3), Usage(1, 40, 10))
    assert await found.step(PAIR) == {"prefix_hit_share": 0.5, "preemptions": 0.0}
    assert await found.step(PAIR) == {}, "it did not say"
    assert await found.step(PAIR) == {"prefix_hit_share": 0.75, "preemptions": 3.0}
    assert await found.step(PAIR) == {"prefix_hit_share": 0.25, "preemptions": 0.0}, "it was started again"


async def test_a_server_that_was_started_again_is_known_also_where_it_has_counted_more() -> None:
    counted = Usage(2, 100, 50), Usage(6, 300, 90, 3), Usage(8, 400, 90, 3)
    found = UsageMeter([cast("PolicyServer", Server(*counted, aliases=["policy-a", "policy-b", "policy-b"]))])
    assert await found.step(PAIR) == {"prefix_hit_share": 0.5, "preemptions": 0.0}
    assert await found.step(PAIR) == {"prefix_hit_share": 0.3, "preemptions": 3.0}, (
        "all of it was counted since the start"
    )
    assert await found.step(PAIR) == {"prefix_hit_share": 0.0, "preemptions": 0.0}


async def test_a_server_that_was_claimed_anew_may_have_gone_on_so_one_step_is_unknown() -> None:
    server = Server(Usage(2, 100, 50), Usage(900, 9000, 90, 30), Usage(902, 9100, 140, 30))
    found = UsageMeter([cast("PolicyServer", server)])
    assert await found.step(PAIR) == {"prefix_hit_share": 0.5, "preemptions": 0.0}
    server.claim = "another"
    assert await found.step(PAIR) == {}
    assert await found.step(PAIR) == {"prefix_hit_share": 0.5, "preemptions": 0.0}


async def test_preemptions_are_told_once_with_the_cure(warnings_of: Callable[[], list[str]]) -> None:
    found = meter(Usage(8, 80, 8, 2), Usage(16, 160, 16, 9))
    await found.step(PAIR)
    await found.step(PAIR)
    (told,) = warnings_of()
    assert "preempted 2 requests" in told
    assert "policy_server.kv_cache_bytes" in told


async def test_shared_prompts_of_which_nothing_was_found_are_told_once(warnings_of: Callable[[], list[str]]) -> None:
    found = meter(Usage(24, 24 * 386), Usage(48, 48 * 386))
    await found.step(PAIR)
    await found.step(PAIR)
    (told,) = warnings_of()
    assert "in 24 requests of 386 tokens" in told
    assert "policy_server.kv_cache_bytes" in told
    assert "--no-enable-prefix-caching" in told


@pytest.mark.parametrize(
    ("usage", "groups"),
    [
        (Usage(24, 24 * 40), PAIR),  # shorter than a block
        (Usage(24, 24 * 386, 32), PAIR),
        (Usage(24, 24 * 386), [Group("g", cast("Any", ("alone",)))]),
        (Usage(), PAIR),
    ],
)
async def test_what_is_no_wonder_is_not_told(
    usage: Usage, groups: list[Group], warnings_of: Callable[[], list[str]]
) -> None:
    await meter(usage).step(groups)
    assert warnings_of() == []


async def test_a_run_records_it_with_each_step(bench: Any, tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        made.policy.used = Usage(10, 1000, 600)
        await made.loop.run({})
        first, *_, last = [record.metrics for record in await made.store.steps("run")]
    assert (first["prefix_hit_share"], first["preemptions"]) == (0.6, 0.0)
    assert "prefix_hit_share" not in last, "nothing came since, so that no share is known"


async def test_several_servers_have_counts_of_their_own_besides_those_of_all() -> None:
    servers = [Server(Usage(2, 100, 50), Usage(4, 200, 150)), Server(Usage(1, 300, 50, 1), None)]
    for number, server in enumerate(servers):
        server.version = number
    found = UsageMeter(cast("list[PolicyServer]", servers))
    assert await found.step([]) == {
        "prefix_hit_share": 0.25,
        "preemptions": 1.0,
        "server_0/requests": 2.0,
        "server_0/prefix_hit_share": 0.5,
        "server_0/version": 0.0,
        "server_1/requests": 1.0,
        "server_1/prefix_hit_share": pytest.approx(1 / 6),
        "server_1/version": 1.0,
    }
    later = await found.step([])
    assert later == {
        "server_0/requests": 2.0,
        "server_0/prefix_hit_share": 1.0,
        "server_0/version": 0.0,
        "server_1/version": 1.0,
    }, "the sum is unknown where one is"

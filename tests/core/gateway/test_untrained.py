"""The headers by which an agent says which calls are not trained, and what becomes of them in the record."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.runner.attempt_completion import report
from lightning.types import Outcome

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi there"}]}
UNTRAINED, REJECTED = "x-lightning-untrained", "x-lightning-rejected"


async def test_this_call_and_earlier_ones_are_marked(house: Any, warnings_of: Any) -> None:
    http = await house.http()
    first = (await http.post("/chat/completions", json=HI)).json()["id"]
    for headers in (
        [(UNTRAINED, "title")],
        [(REJECTED, first), (REJECTED, "chatcmpl-unknown  compaction, rejected")],
        [(REJECTED, f"{first} compaction, rejected")],
    ):
        answer = await http.post("/chat/completions", json={**HI, "n": 2}, headers=headers)
        assert answer.status_code == 200, answer.text
    calls = await house.transitions()
    assert [(call.choice, call.untrained) for call in calls[1:3]] == [(0, "title"), (1, "title")]
    assert [dict(call.rejects) for call in calls[3:5]] == [
        {first: "rejected", "chatcmpl-unknown": "compaction, rejected"},
        {},
    ]
    lease = house.leases[0]
    await report(house.store, lease.rollout.id, lease.attempt, Outcome(reward=1.0))
    marked = [call.untrained for call in await house.transitions()]
    assert marked == ["compaction, rejected", "title", "title", "", "", "", ""]
    (said,) = warnings_of()
    assert "a rejection named 1 responses that are not recorded, such as 'chatcmpl-unknown'" in said


async def test_what_the_agents_process_says_of_a_call_counts_before_a_header(house: Any) -> None:
    http = await house.http()
    first = (await http.post("/chat/completions", json=HI)).json()["id"]
    await http.post("/chat/completions", json=HI, headers={REJECTED: first})
    lease = house.leases[0]
    await report(house.store, lease.rollout.id, lease.attempt, Outcome(reward=1.0, untrained={first: "unreadable"}))
    assert [call.untrained for call in await house.transitions()] == ["unreadable", ""]


BAD = [
    (UNTRAINED, "", "The header x-lightning-untrained is ''"),
    (UNTRAINED, "r" * 81, "say in 1 to 80 printable ASCII characters why the call is not trained"),
    (UNTRAINED, "a\tb", "is 'a\\tb'"),
    (UNTRAINED, b"\xe4", "printable ASCII"),
    (REJECTED, "", "names the call '': give the `id` of an earlier reply"),
    (REJECTED, "i" * 201, "give the `id` of an earlier reply to this attempt, such as 'chatcmpl-1a2b'"),
    (REJECTED, "chatcmpl-1 " + "r" * 81, "The reason in x-lightning-rejected is 'rrr"),
    (
        REJECTED,
        "chatcmpl-1, chatcmpl-2",
        "names several calls: 'chatcmpl-1, chatcmpl-2'. Send one header for each call",
    ),
    (REJECTED, "chatcmpl-1 summary, rejected, chatcmpl-2", "names several calls"),
    ("x-lightning-untrain", "title", "There is no header 'x-lightning-untrain': send x-lightning-untrained"),
    ("x-lightning-rejects", "chatcmpl-1", "or x-lightning-rejected for an earlier one"),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD, ids=range(len(BAD)))
async def test_a_mark_without_effect_is_refused(house: Any, name: str, value: Any, said: str) -> None:
    http = await house.http()
    answer = await http.post("/chat/completions", json=HI, headers={name: value})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_mark")
    assert said in answer.json()["error"]["message"]
    assert [call.status.value for call in await house.transitions()] == ["refused"]

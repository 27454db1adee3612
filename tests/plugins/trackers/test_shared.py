"""What trackers write of a call, in whatever form it was answered."""

from __future__ import annotations

import pytest
from lightning.types import Json
from lightning_record.exchanges import Exchange
from lightning_trackers.shared import messages_of

ASKED = {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        ({"messages": [ASKED]}, {"choices": [{"message": ANSWERED}]}),
        ({"prompt": "2 + 2?"}, {"choices": [{"text": "4"}]}),
        ({"input": "2 + 2?"}, {"output": [ANSWERED]}),
        ({"messages": [ASKED]}, ANSWERED),
        ({"messages": [ASKED]}, "4"),
    ],
    ids=["chat", "completions", "responses", "messages", "no JSON"],
)
def test_the_answer_of_a_call_is_its_last_message(request_: Json, reply: Json) -> None:
    assert messages_of(Exchange("/any", request_, reply, 200)) == [ASKED, ANSWERED]


def test_a_call_without_an_answer_has_what_was_asked() -> None:
    assert messages_of(Exchange("/any", {"prompt": [1, 2]}, None, 0)) == []
    assert messages_of(Exchange("/any", {"messages": [ASKED]}, None, 0)) == [ASKED]

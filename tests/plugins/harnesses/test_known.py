"""Side calls and compactions of known programs are known by their requests, which were recorded (`data/`) or are as published.

Long texts of the recorded requests are cut, only one tool is kept, and ids are zeroes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning_harnesses.known import PATTERNS
from lightning_harnesses.requests import read

DATA = Path(__file__).parent / "data"
RECORDED = {
    "claude-code-title": "title",
    "claude-code-turn": "",
    "claude-code-compaction": "compaction",
    "claude-code-after-compaction": "",
    "opencode-title": "title",
    "opencode-turn": "",
}


def recorded(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def rule_of(body: dict[str, Any]) -> str:
    asked = read(body)
    return next((each.rule for each in PATTERNS if each.matches(asked)), "")


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_known(name: str) -> None:
    assert rule_of(recorded(name)["body"]) == RECORDED[name]


def test_the_recordings_are_those_that_are_tested() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == RECORDED.keys()


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def parts(role: str, *texts: str, kind: str = "text") -> dict[str, Any]:
    return {"role": role, "content": [{"type": kind, "text": text} for text in texts]}


CODEX = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM"
OPENHANDS = "You are maintaining a context-aware state summary for an interactive agent.\nYou will be given"
CLAUDE = "Your task is to create a detailed summary of the conversation so far"
TOPIC = "Analyze if this message indicates a new conversation topic. If it does"
SUMMARY = "Summarize what was done in this conversation. Write like a pull request description."
PUBLISHED = [
    ("quota", {"max_tokens": 1, "messages": user("quota")}),
    ("", {"max_tokens": 2, "messages": user("quota")}),
    ("topic", {"system": TOPIC, "messages": user("x")}),
    ("summary", {"messages": [parts("system", SUMMARY), *user("x")]}),
    ("compaction", {"input": [parts("user", "fix", kind="input_text"), parts("user", CODEX, kind="input_text")]}),
    ("compaction", {"messages": [parts("user", OPENHANDS)]}),
    ("compaction", {"messages": [*user("fix it"), parts("user", "log", CLAUDE)]}),
    # Texts of a known program that others only speak of, or that stand in the history.
    ("", {"messages": user("What does 'You are a title generator. You output ONLY a thread title.' do?")}),
    ("", {"messages": [*user(CLAUDE), parts("assistant", "It is"), *user("go on")]}),
    ("", {"messages": [{"role": "tool", "content": CODEX}]}),
    # Any shape is read.
    ("", {"messages": [None, 3, {"role": "user"}, {"role": "user", "content": [None, {"text": 3}, {"image": {}}]}]}),
    ("", {"prompt": ["a", "b"], "system": {"a": 1}}),
    ("", {"input": 3}),
    ("", {}),
]


@pytest.mark.parametrize(("rule", "body"), PUBLISHED)
def test_requests_as_programs_publish_them(rule: str, body: dict[str, Any]) -> None:
    assert rule_of(body) == rule


@pytest.mark.parametrize("name", ["claude-code-title", "opencode-title", "claude-code-compaction", "opencode-turn"])
async def test_through_their_dialects_the_record_has_the_reason(
    house: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = recorded(name)
    http = await house.http()
    for _ in range(2):
        answer = await http.post(said["path"], json=said["body"], headers=said["headers"])
        assert answer.status_code == 200, answer.text
    calls = await house.transitions()
    reason = RECORDED[name]
    assert [call.untrained for call in calls] == [reason if reason != "compaction" else ""] * 2
    assert [call.extras.get("harnesses", b"").decode() for call in calls] == [
        reason if reason == "compaction" else ""
    ] * 2
    assert sum("recorded and not trained" in each for each in caplog.messages) == (1 if reason else 0)

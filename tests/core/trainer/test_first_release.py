"""A run that the release 0.1.0 has trained is still proven: its database is opened, brought forward, and derived again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from lightning.audit import AuditReport, audit
from lightning.store.sqlite import SqliteStore

RUN = Path(__file__).parent / "frozen" / "run-0.1.0.sql"


async def audited(path: Path, change: str = "") -> AuditReport:
    database = sqlite3.connect(path)
    database.executescript(RUN.read_text() + change)
    database.close()
    store = SqliteStore(path)
    await store.open()
    try:
        return await audit(store, "run")
    finally:
        await store.close()


async def test_it_is_as_it_was_trained(tmp_path: Path) -> None:
    report = await audited(tmp_path / "store.db")
    assert (report.steps, report.rollouts, report.calls, report.tokens) == (2, 14, 28, 56)
    assert report.rederived
    assert report.ok, report.findings


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE rollouts SET reward = reward + 1 WHERE trained_at_step = 1", "are not the trained ones"),
        ("UPDATE steps SET digest = 'another' WHERE step = 0", "its training rows are not the ones"),
    ],
)
async def test_what_was_changed_since_is_found(tmp_path: Path, change: str, problem: str) -> None:
    report = await audited(tmp_path / "store.db", f"{change};")
    assert any(problem in finding.problem for finding in report.findings)

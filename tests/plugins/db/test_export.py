"""An export read back is what the store holds, in both formats, whatever was put into it."""

from __future__ import annotations

import json
import re
import sys
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import MissingExtraError, StoreError
from lightning.installation import install_command
from lightning.store.memory import MemoryStore
from lightning.store.protocol import Store
from lightning.types import Fault, Outcome, Rollout, Run, Task, ToolEvent, Transition, logprobs, token_ids
from lightning_db import export_files as files
from lightning_db.export import TABLES, ColumnKind, ExportScope, Record, chosen_runs, read_table
from lightning_db.export_files import Format, Parquet, json_line, write_table
from lightning_record import exchanges
from lightning_record.exchanges import TEXTS

ALL = ExportScope()
ODD = 'a "quote", \n, ü, \x00 and \ud800 half of one'


@pytest.fixture
async def store(filled: Callable[..., Any]) -> AsyncIterator[Store]:
    made = MemoryStore()
    await made.open()
    await filled(made)
    yield made
    await made.close()


async def exported(
    store: Store, kind: Format, folder: Path, scope: ExportScope = ALL
) -> dict[str, list[dict[str, Any]]]:
    """Every table, written and read back."""
    runs = await chosen_runs(store, scope.runs)
    found = {}
    for name, table in TABLES.items():
        target = folder / f"{name}.{kind.value}"
        count = await write_table(read_table(store, name, runs, scope), table.columns, kind, target)
        found[name] = read(target, kind)
        assert len(found[name]) == count
    return found


def read(file: Path, kind: Format) -> list[dict[str, Any]]:
    if kind is Format.JSONL:
        return [json.loads(line) for line in file.read_text().splitlines()]
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    columns = TABLES[file.stem].columns if file.stem in TABLES else {}
    for row in rows:
        for name, column in columns.items():
            if column is ColumnKind.JSON and row[name] is not None:
                row[name] = json.loads(row[name])
    return rows


@pytest.mark.parametrize("kind", list(Format))
async def test_calls_are_exported_bit_for_bit(store: Store, tmp_path: Path, kind: Format) -> None:
    found = (await exported(store, kind, tmp_path))["transitions"]
    rollouts = (await store.list_rollouts("run")).items
    calls = [call for rollout in rollouts for call in await store.transitions(rollout.id)]
    assert len(found) == len(calls) == 20
    for row, call in zip(found, calls, strict=True):
        assert (row["rollout"], row["attempt"], row["seq"], row["id"]) == (*call.key, call.id)
        assert array("i", row["prompt_ids"]) == call.prompt_ids
        assert array("i", row["response_ids"]) == call.response_ids
        assert array("f", row["logprobs"]).tobytes() == call.logprobs.tobytes()
        assert (row["agent"], row["path"], row["framework"]) == (
            call.caller.agent,
            list(call.caller.path),
            call.caller.framework,
        )
        assert row["versions"] == [
            {"start": 0, "version": 3, "policy": "policy"},
            {"start": 2, "version": 4, "policy": "policy"},
        ]
        assert (row["split"], row["temperature"], row["constrained"]) == (row["split"], 0.7, False)
        assert (row["started_at"], row["ended_at"], row["tool_calls"]) == (1.25, 2.5, ["t-1"])
        said = {"after": "call", "kept": 1, "messages": [{"role": "user", "content": "q"}]}
        assert row["conversation"] == (said if call.seq == 0 else None)
        assert {name: b64decode(kept) for name, kept in row["extras"].items()} == {"masks": bytes((call.seq, 0, 255))}
        assert (row["api"], row["request"], row["reply"]) == ("/chat/completions", {"n": call.seq}, {"id": "x"})
    assert {row["split"] for row in found} == {"train", "val"}


@pytest.mark.parametrize("kind", list(Format))
async def test_the_other_tables_have_what_the_store_has(store: Store, tmp_path: Path, kind: Format) -> None:
    found = await exported(store, kind, tmp_path)
    assert {name: len(rows) for name, rows in found.items()} == {
        "runs": 1,
        "rollouts": 10,
        "transitions": 20,
        "tool_events": 10,
        "step_rewards": 10,
        "step_states": 10,
        "outcome_extras": 10,
        "spans": 10,
        "steps": 2,
        "metrics": 4,
    }
    (run,) = found["runs"]
    assert (run["run"], run["project"], run["config"]["model"]) == ("run", "lab", "tiny")
    (epoch,) = run["epochs"]
    assert (epoch["epoch"], epoch["first"], epoch["config"]["config"]["trainer"]["max_staleness"]) == (1, 2, 0)
    first, failed = found["rollouts"][0], found["rollouts"][3]
    assert (first["reward"], first["rewards"], first["trained_at_step"], first["fault"]) == (0.5, {"f1": 0.5}, 1, None)
    assert (first["input"], first["expected"], first["metadata"]) == ({"q": "1/0"}, ["a"], {"m": 1})
    assert (failed["status"], failed["reward"], failed["fault"], failed["error"]) == ("failed", None, "agent", "no")
    assert found["tool_events"][0]["arguments"] == {"x": 1}
    assert (found["step_rewards"][0]["value"], found["step_rewards"][0]["name"]) == (0.25, "fmt")
    assert found["spans"][0]["attributes"] == {"k": [1]}
    assert found["steps"][1]["rollouts"][0] == {"rollout": "run/2/0/0", "attempt": 1}
    assert (found["steps"][1]["policy"], found["steps"][1]["extras"]) == ("policy", {"advice": "AGE="})
    extra = found["outcome_extras"][0]
    assert (extra["rollout"], extra["plugin"], b64decode(extra["bytes"])) == ("run/1/0/0", "taint", b"\0t")
    odd = next(row["value"] for row in found["metrics"] if row["name"] == "odd")
    assert odd is None if kind is Format.JSONL else odd != odd


@pytest.mark.parametrize("kind", list(Format))
async def test_odd_text_and_numbers_survive(tmp_path: Path, kind: Format) -> None:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("a", "run", Task({"q": ODD, "big": 10**30}), "g")])
    await store.lease("run", "w")
    empty = Transition("a", 1, 0, "c", token_ids(), token_ids(), logprobs())
    special = Transition("a", 1, 1, "d", token_ids([1]), token_ids([2, 3]), logprobs([float("nan"), float("-inf")]))
    await store.append([empty, special])
    event = ToolEvent("t", "error", arguments={"n": float("inf"), "t": ODD}, output=ODD)
    await store.complete("a", 1, Outcome(fault=Fault.AGENT, error=ODD, tool_events=(event,)))
    found = await exported(store, kind, tmp_path)
    assert found["rollouts"][0]["input"] == {"q": ODD, "big": 10**30}
    assert found["tool_events"][0]["arguments"] == {"n": None, "t": ODD}
    assert found["tool_events"][0]["output"].startswith('a "quote", \n, ü, ')
    assert [row["prompt_ids"] for row in found["transitions"]] == [[], [1]]
    if kind is Format.PARQUET:
        assert array("f", found["transitions"][1]["logprobs"]).tobytes() == special.logprobs.tobytes()
    else:
        assert found["transitions"][1]["logprobs"] == [None, None]
    await store.close()


async def test_what_is_exported_can_be_chosen(store: Store, tmp_path: Path) -> None:
    await store.put_run(Run("other", "other"))
    await store.create_rollouts([Rollout("o", "other", Task("q"), "g")])
    await store.lease("other", "w", ttl=0)
    ids = token_ids([1])
    await store.append([Transition("o", 1, 0, "lost", ids, ids, logprobs([-1.0]))])
    await store.lease("other", "w")
    await store.append([Transition("o", 2, 0, "counts", ids, ids, logprobs([-1.0]))])

    async def ids_of(scope: ExportScope) -> list[Any]:
        runs = await chosen_runs(store, scope.runs)
        return [row["id"] async for row in read_table(store, "transitions", runs, scope)]

    assert await ids_of(ExportScope(("other",))) == ["counts"]
    assert await ids_of(ExportScope(("other",), attempts=True)) == ["lost", "counts"]
    assert len(await ids_of(ExportScope(split="val"))) == 4
    assert len(await ids_of(ExportScope())) == 21
    with pytest.raises(StoreError, match="no run 'x' in this store; it has other, run"):
        await chosen_runs(store, ["x"])


@pytest.mark.parametrize("kind", list(Format))
async def test_branches_are_exported_with_what_they_have_of_their_parents(
    store: Store, tmp_path: Path, kind: Format
) -> None:
    """One whose parent was removed, or made again under the same id, says so in its own rows, and nothing else is lost."""
    asked = exchanges.canonical({"messages": ["a" * 100]})
    run = Run("branches", "branches")
    recorded = exchanges.pack("/c", 200, asked, b"{}")
    (base,) = exchanges.said_in_parent([_call("p", recorded)], [0])
    own = exchanges.pack("/c", 200, asked, b"{}", base)
    unread = {
        "lost": "of its parent gone, whose calls are not in the store",
        "other": "of its parent anew, and that is another call now: anew was removed and made again",
        "unrecorded": "of its parent silent, of which no request is recorded now: silent was removed and made again",
    }
    trunks = {"p": recorded, "anew": exchanges.pack("/c", 200, asked, b'{"id": "another"}'), "silent": None}
    branches = {"b": "p", "lost": "gone", "other": "anew", "unrecorded": "silent"}
    await store.put_run(run)
    await store.create_rollouts(
        [Rollout(name, run.id, Task("q"), name) for name in trunks]
        + [Rollout(name, run.id, Task("q"), name, parent=(parent, 1, 0)) for name, parent in branches.items()]
    )
    await store.lease(run.id, "w", limit=len(trunks) + len(branches))
    for name, exchange in trunks.items():
        await store.append([_call(name, exchange)])
    for name in branches:
        await store.append([_call(name, own), replace(_call(name), seq=1, id=f"{name} later")])
    rows = (await exported(store, kind, tmp_path, ExportScope((run.id,))))["transitions"]
    found = {row["id"]: row for row in rows}
    assert list(found) == [*trunks, *(each for name in branches for each in (name, f"{name} later"))]
    assert found["b"]["request"] == found["p"]["request"] == {"messages": ["a" * 100]}
    for name, why in unread.items():
        row = found[name]
        assert (row["api"], row["request"], row["prompt_ids"]) == ("", None, [1])
        assert why in row["unreadable"]
    assert not any(row["unreadable"] for name, row in found.items() if name not in unread)


async def test_damage_is_not_exported_as_a_parent_that_is_gone(store: Store) -> None:
    await store.put_run(Run("damaged", "damaged"))
    await store.create_rollouts([Rollout("p", "damaged", Task("q"), "p")])
    await store.lease("damaged", "w")
    await store.append([_call("p", exchanges.pack("/c", 200, b"{}", b"{}")[:8])])
    with pytest.raises(StoreError, match="is corrupt"):
        [row async for row in read_table(store, "transitions", await chosen_runs(store, ["damaged"]), ALL)]


def _call(rollout: str, exchange: bytes | None = None) -> Transition:
    ids = token_ids([1])
    return Transition(
        rollout, 1, 0, rollout, ids, ids, logprobs([-1.0]), extras={} if exchange is None else {TEXTS: exchange}
    )


async def test_a_table_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    async def rows() -> AsyncIterator[Record]:
        yield {"run": "a"}
        raise KeyError("lost")

    for kind in Format:
        with pytest.raises(KeyError):
            await write_table(rows(), {"run": ColumnKind.TEXT}, kind, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "t").write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        await write_table(rows(), {"run": ColumnKind.TEXT}, Format.JSONL, tmp_path / "t")
    assert (tmp_path / "t").read_text() == "mine"


async def test_parquet_is_written_in_groups_of_bounded_size(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr(files, "GROUP_ROWS", 6)
    table = TABLES["transitions"]
    rows = read_table(store, "transitions", await chosen_runs(store, ()), ExportScope())
    assert await write_table(rows, table.columns, Format.PARQUET, tmp_path / "a.parquet") == 20
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 4
    monkeypatch.setattr(files, "GROUP_BYTES", 1)
    rows = read_table(store, "transitions", await chosen_runs(store, ()), ExportScope())
    await write_table(rows, table.columns, Format.PARQUET, tmp_path / "b.parquet")
    assert pq.ParquetFile(tmp_path / "b.parquet").num_row_groups == 20


async def test_a_table_without_rows_has_its_columns_in_parquet(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    store = MemoryStore()
    await store.open()
    found = await exported(store, Format.PARQUET, tmp_path)
    assert not any(found.values())
    for name, table in TABLES.items():
        assert pq.read_schema(tmp_path / f"{name}.parquet").names == list(table.columns)
    await store.close()


def test_without_pyarrow_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("parquet"))):
        Parquet(tmp_path / "t.parquet", {"run": ColumnKind.TEXT})


@pytest.mark.parametrize("table", list(TABLES))
async def test_rows_have_exactly_the_columns_that_are_declared(store: Store, table: str) -> None:
    async for row in read_table(store, table, await chosen_runs(store, ()), ExportScope()):
        assert list(row) == list(TABLES[table].columns)


def test_what_is_no_json_is_not_written_as_something_else() -> None:
    with pytest.raises(TypeError):
        json_line({"run": object()})  # type: ignore[dict-item]

"""A folder of pages: what is in it, what is left out, and that nothing else is needed to write or read it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.errors import ConfigError, DataError
from lightning.store.sqlite import SqliteStore
from lightning.types import Rollout, Run, Task
from lightning_console.export import Exported, _is_followed, export_pages, links_of

from tests.plugins.console import made_pages


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    made_pages.register(monkeypatch)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    store = SqliteStore(folder / "lightning.db")
    await store.open()
    await store.put_run(Run("a", "the run"))
    await store.create_rollouts([Rollout(f"a/{n}", "a", Task(input="?"), "a") for n in range(5)])
    await store.close()
    return str(folder)


def read_page(folder: Path, name: str) -> dict:
    text = (folder / "data" / name).read_text()
    return json.loads(text.removeprefix("lightning.page(").removesuffix(");\n"))


async def test_the_folder_has_the_pages_that_links_lead_to(place: str, tmp_path: Path) -> None:
    written = await export_pages(place, "run/a", tmp_path / "out", rollouts=3)
    index = (tmp_path / "out" / "data" / "index.js").read_text()
    files = json.loads(index[index.index("exported(") + 9 : -4])["files"]
    assert {"run/a", "runs", *(f"rollout/a/a%2F{n}" for n in range(3))} <= set(files)
    assert not any("sort=" in address or "a%2F3" in address for address in files)
    assert "at least 2 rollouts are left out" in written.said
    assert written.pages == len(files)
    page = read_page(tmp_path / "out", files["run/a"])
    assert page["live"] is False
    assert [block["component"] for block in page["blocks"]] == ["Notices", "Table"], "no buttons"
    html = (tmp_path / "out" / "index.html").read_text()
    assert "static/shell.js" in html
    assert "http" not in html
    assert 'type="module"' not in html
    assert (tmp_path / "out" / "static" / "shell.js").is_file()


async def test_a_second_export_takes_the_place_of_the_first_and_of_nothing_else(place: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = await export_pages(place, "run/a", out)
    second = await export_pages(place, "run/a", out, rollouts=1)
    assert isinstance(second, Exported)
    assert len(list((out / "data").iterdir())) == second.pages + 1 < first.pages + 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(ConfigError, match="something else in it"):
        await export_pages(place, "run/a", tmp_path / "mine")
    with pytest.raises(ConfigError, match="no run 'b'"):
        await export_pages(place, "run/b", tmp_path / "b")
    with pytest.raises(DataError, match="step/a/1 cannot be exported: A fault"):
        await export_pages(place, "step/a/1", tmp_path / "c")


def test_an_export_of_a_run_has_no_comparison_with_another() -> None:
    runs = frozenset({"a", "a.branches"})
    followed = ("versions?of=a@0,a@4", "compare?runs=a", "compare?runs=a,a.branches", "metrics/a", "runs")
    others = ("versions?of=b@0,b@4", "versions?of=a@4,b@4", "versions", "compare?runs=a,b", "compare", "metrics/b")
    assert {link: _is_followed(link, runs) for link in (*followed, *others)} == {
        **dict.fromkeys(followed, True),
        **dict.fromkeys(others, False),
    }
    assert all(_is_followed(link, frozenset()) for link in (*followed, *others))


def test_links_are_found_wherever_an_address_is_named() -> None:
    page = {"next": "b", "trail": [{"to": "c"}], "blocks": [{"value": {"series": [{"to": ["d", "e"]}], "left": "no"}}]}
    assert list(links_of(page)) == ["b", "c", "d", "e"]


def test_an_export_needs_no_gradio(tmp_path: Path) -> None:
    code = (
        "import sys, lightning_console.export, lightning_console.command; "
        "print(sorted({'gradio', 'mcp', 'torch'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"

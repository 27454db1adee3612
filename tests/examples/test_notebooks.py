"""The notebooks run from top to bottom, with fewer steps than a reader takes; one vLLM serves all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from lightning.config.sections import PolicyServerConfig
from lightning.policy_server.vllm_server import OwnedVLLM
from lightning_examples.raw_python import MODEL
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
SHORTER = {
    "first_training": "STEPS, HELD_OUT = 1, 4",
    "reading_a_run": "STEPS = 1",
    "own_loss": "STEPS, SEEDS, HELD_OUT = 1, 1, 4",
}
"""What stands in the place of each notebook's cell with the tag `parameters`."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a vLLM with the tiny model."""
    server = OwnedVLLM(MODEL, PolicyServerConfig(device="cpu"), log=tmp_path_factory.mktemp("vllm") / "vllm.log")
    asyncio.run(server.start())
    try:
        yield server.url
    finally:
        asyncio.run(server.close())


def test_every_notebook_is_run() -> None:
    assert {file.stem for file in NOTEBOOKS.glob("*.ipynb")} == set(SHORTER)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHORTER)
def test_a_notebook_runs(name: str, vllm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_POLICY_SERVER__ATTACH", vllm)
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (parameters,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source = SHORTER[name]
    NotebookClient(book, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()

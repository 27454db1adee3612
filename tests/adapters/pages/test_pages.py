"""The pages of frameworks that cannot live beside the others: their blocks run here, where these are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.test_docs_run import files_with, run


@pytest.mark.parametrize("name", files_with("elsewhere"))
def test_pages_run(name: str, tmp_path: Path) -> None:
    run(name, tmp_path, "elsewhere")

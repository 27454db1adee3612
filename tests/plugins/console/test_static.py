"""The files that draw pages: one for each block, and nothing in them makes markup of data or asks anybody."""

from __future__ import annotations

import re

import pytest
from lightning_console import blocks

from tests.plugins.console.gallery import STATIC

COMPONENTS = sorted(
    kind.__name__
    for kind in vars(blocks).values()
    if isinstance(kind, type) and issubclass(kind, blocks.Block) and kind is not blocks.Block
)
FORBIDDEN = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "DOMParser",
    "createContextualFragment",
    "setHTMLUnsafe",
    "srcdoc",
    "fetch(",
    "XMLHttpRequest",
    "import(",
    "import ",
    "export ",
    "@import",
    "url(",
    "localStorage",
    "window.confirm",
)
FILES = sorted(path.name for path in STATIC.iterdir() if path.suffix in (".js", ".css"))


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_block_has_its_component(component: str) -> None:
    text = (STATIC / f"{component}.js").read_text()

    assert f"lightning.components.{component} = " in text


@pytest.mark.parametrize("name", FILES)
def test_data_never_becomes_markup_and_no_file_asks_anybody(name: str) -> None:
    text = (STATIC / name).read_text()
    code = "\n".join(line.split(" // ")[0] for line in text.splitlines() if not line.lstrip().startswith(("//", "/*")))

    assert [word for word in FORBIDDEN if word in code] == []
    assert set(re.findall(r"\w+://[^\"' ]*", code)) <= {"http://www.w3.org/2000/svg"}


def test_every_script_can_be_loaded_in_any_order() -> None:
    for path in STATIC.glob("*.js"):
        assert "window.lightning = window.lightning || {components: {}};" in path.read_text(), path.name

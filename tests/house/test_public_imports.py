"""Our plugins import what a stranger's may import, and what is listed for them is what some plugin needs."""

from __future__ import annotations

import contextlib
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from lightning.testing import check_imports
from lightning.testing.public_imports import FOR_ADAPTERS, PUBLIC, _file_of, _imports, _sources

from tests.house.test_modules import ROOT

ADAPTERS = sorted(folder.parent.name for folder in ROOT.glob("adapters/*/lightning_*/__init__.py"))
OTHERS = sorted(folder.parent.name for folder in ROOT.glob("plugins/*/lightning_*/__init__.py"))
OTEL = ROOT / "adapters/otel/lightning_otel"
BESIDE = [f"lightning_otel.{folder.parent.name}" for folder in OTEL.glob("*/__init__.py")]
"""In the package of that adapter, and no part of it: a plugin of the gateway."""
PARTS = [package for package in ADAPTERS if package != OTEL.name]
PARTS += [f"lightning_otel.{file.stem}" for file in sorted(OTEL.glob("*.py"))]


@pytest.mark.parametrize("part", PARTS)
def test_an_adapter_imports_what_adapters_may(part: str) -> None:
    check_imports(part, *FOR_ADAPTERS)


@pytest.mark.parametrize("package", [*OTHERS, *BESIDE, "lightning_examples"])
def test_a_plugin_imports_what_is_public(package: str) -> None:
    check_imports(package)


def test_these_are_all_of_our_plugins() -> None:
    installed = {entry.module.partition(".")[0] for entry in entry_points(group="lightning")}
    assert installed - {"lightning"} == {*ADAPTERS, *OTHERS, "lightning_examples"}


KEPT = ("any plugin", "any plugin but an adapter")
"""Groups that are public whoever uses them."""


def test_what_is_listed_is_there_and_needed() -> None:
    """Beyond what is kept, a module is public because a plugin or a page of the documentation imports it."""
    files = [file for package in (*ADAPTERS, *OTHERS, "lightning_examples") for file in _sources(package)]
    used = {module for file in files for _, module, _ in _imports(file)}
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for group, modules in PUBLIC.items():
        assert all(map(_file_of, modules)), group
        if group not in KEPT:
            assert [module for module in modules if module not in used and f"from {module} import" not in pages] == []


def test_the_documentation_imports_what_is_public(tmp_path: Path) -> None:
    """From pages one learns what there is, so they import nothing that is private."""
    public = {module for modules in PUBLIC.values() for module in modules}
    file, found = tmp_path / "block.py", {}
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            with contextlib.suppress(SyntaxError):  # a block of parts, with dots between
                file.write_text(block)
                found |= {module: page.name for _, module, _ in _imports(file)}
    assert {m: page for m, page in found.items() if m not in public and not m.endswith(".protocol")} == {}


SOURCE = """
import lightning.gateway
from lightning.store import SqliteThing
from lightning.runner import process, warmth
from lightning.types.recorded import Span
from lightning.moved import away
from lightning.trainer.trainer import Prepared
if False:
    from lightning.engines.protocol import Engine
"""


def test_a_private_import_is_named_with_its_line_and_the_public_place(install) -> None:
    file = install("curious", {}, {"curious_plugin": SOURCE}) / "curious_plugin.py"
    with pytest.raises(AssertionError) as caught:
        check_imports("curious_plugin")
    said = str(caught.value).splitlines()
    nothing = "nothing public offers it; docs/writing-a-plugin.md lists what is public"
    assert said == [
        "curious_plugin imports what is private in lightning:",
        f"{file}:2: lightning.gateway: {nothing}",
        f"{file}:4: lightning.runner.warmth: {nothing}",
        f"{file}:5: lightning.types.recorded.Span: import it from lightning.types",
        f"{file}:6: lightning.moved.away: this lightning has no such module",
        f"{file}:7: lightning.trainer.trainer.Prepared: {nothing}",
    ]
    with pytest.raises(AssertionError, match=r"curious_plugin.py:4: lightning\.runner\.process: nothing public"):
        check_imports("curious_plugin", *FOR_ADAPTERS)
    with pytest.raises(AssertionError, match="no_such_plugin is not installed here"):
        check_imports("no_such_plugin")
    with pytest.raises(AssertionError, match=r"nosuch\.thing is not installed here"):
        check_imports("nosuch.thing")
    file.write_text("from lightning.trainer.trainer import Trainer\n")
    with pytest.raises(AssertionError, match=r"Trainer: import it from lightning$"):
        check_imports("curious_plugin")

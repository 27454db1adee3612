"""Makes the files of a target from its plan and the templates beside this module, in a folder that the user owns.

The invariant: a template only places values. A text of the user is quoted for the program that reads the file. A file that
somebody has edited is never overwritten without `force`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lightning.errors import ConfigError, MissingExtraError

from lightning_deploy.agent_sources import LEFT_OUT, own_source
from lightning_deploy.deploy_plan import PORT, DeployPlan, Places
from lightning_deploy.sweep import read_json

Lock = Callable[[Sequence[str], Sequence[str], str], str]

TARGETS: Mapping[str, tuple[str, ...]] = {
    "docker": ("scripts", "docker"),
    "compose": ("scripts", "docker", "compose"),
    "k8s": ("scripts", "docker", "k8s"),
    "sky": ("scripts", "sky"),
}
"""The folders of templates for each target."""
CLUSTER = Places("postgresql://lightning@store:5432/lightning", f"http://trainer:{PORT}")
"""Addresses in a compose project and in a namespace, where a service's name is its host name."""
HEALTH = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/api/v1/health', timeout=4)"
UV = "0.11"
SCRIPTS = ("train-or-resume", "make-tokens", "build.sh", "apply.sh")

# Machines with 1, 2, ... GPUs, as Azure and AWS list them (learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated,
# aws.amazon.com/ec2/instance-types/p5, p4).
AZURE = {
    "h100": {1: "Standard_NC40ads_H100_v5", 2: "Standard_NC80adis_H100_v5", 8: "Standard_ND96isr_H100_v5"},
    "h200": {8: "Standard_ND96isr_H200_v5"},
    "a100": {
        1: "Standard_NC24ads_A100_v4",
        2: "Standard_NC48ads_A100_v4",
        4: "Standard_NC96ads_A100_v4",
        8: "Standard_ND96amsr_A100_v4",
    },
}
AWS = {"h100": {1: "p5.4xlarge", 8: "p5.48xlarge"}, "h200": {8: "p5en.48xlarge"}, "a100": {8: "p4de.24xlarge"}}
SKY = {"h100": "H100", "h200": "H200", "a100": "A100-80GB"}


@dataclass(frozen=True, slots=True)
class Cloud:
    """What SkyPilot is asked for: an infrastructure (empty: any), a spot machine, and the database that outlives the
    machine."""

    name: str = ""
    spot: bool = False
    store: str = ""

    def __post_init__(self) -> None:
        if self.spot and not self.store:
            raise ConfigError(
                "--spot needs --store URL: a spot machine is taken away with its disk, so rollouts are kept in a database "
                "elsewhere (postgresql://user@host/name, its password in PGPASSWORD)"
            )
        authority = self.store.partition("://")[2].partition("@")[0] if "@" in self.store else ""
        if ":" in authority or "password=" in self.store:
            raise ConfigError(
                "--store has a password in it, which would be in a file: leave it out, and set PGPASSWORD"
            )


def render(plan: DeployPlan, target: str, folder: Path, lock: Lock, cloud: Cloud | None = None) -> dict[str, str]:
    """Return the files of a target by their path below `folder`, which is below the project's folder."""
    values = _values(plan, folder, cloud or Cloud())
    found: dict[str, str] = {".gitignore": "# Made by the scripts, and what only you know.\n/wheels/*.whl\n.env\n"}
    for part in TARGETS[target]:
        found |= _templates(part, values)
    if target == "sky":
        found["sky/requirements.txt"] = lock(plan.extras, plan.sources.requirements, plan.python)
        return found
    found["docker/requirements-agent.txt"] = lock((), plan.sources.requirements, plan.python)
    found["docker/requirements-server.txt"] = lock(("console", "postgres"), (), plan.python)
    found["docker/requirements-trainer.txt"] = lock(plan.extras, (), plan.python)
    return found


def render_sweep(plans: Sequence[DeployPlan], name: str, folder: Path, lock: Lock, cloud: Cloud) -> dict[str, str]:
    """Return the files of a SkyPilot job group with a task for each plan. All tasks keep their rollouts in one database, where
    they are compared. Raises `ConfigError` without a database."""
    if not cloud.store:
        raise ConfigError(
            "a sweep on several machines needs --store URL: its runs are compared in one database "
            "(postgresql://user@host/name, its password in PGPASSWORD)"
        )
    found = render(plans[0], "sky", folder, lock, cloud)
    tasks = [_templates("sky", _values(plan, folder, cloud))["sky/task.yaml"] for plan in plans]
    header = f"# {len(plans)} runs of a sweep, side by side; lightning console {cloud.store} compares them.\n"
    group = f"{header}name: {name}\nexecution: parallel\n---\n" + "---\n".join(tasks)
    script = _templates("sky", {**_values(plans[0], folder, cloud), "sweep": name})["sky/apply.sh"]
    del found["sky/task.yaml"]
    return {**found, "sky/sweep.yaml": group, "sky/apply.sh": script}


def _templates(part: str, values: Mapping[str, Any]) -> dict[str, str]:
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError("deploy", "jinja2") from error
    root = Path(str(resources.files("lightning_deploy") / "templates"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 — no HTML
    )
    environment.filters["json"] = json.dumps
    environment.filters["compose"] = lambda text: text.replace("$", "$$")  # or compose would fill in variables
    environment.filters["kubernetes"] = lambda text: text.replace("$", "$$")  # or it would fill in variables
    environment.filters["sh"] = lambda text: shlex.quote(str(text))
    names = sorted(str(file.relative_to(root)) for file in (root / part).rglob("*.j2"))
    return {name.removesuffix(".j2"): environment.get_template(name).render(values) for name in names}


def _values(plan: DeployPlan, folder: Path, cloud: Cloud) -> dict[str, Any]:
    places, gpu, gpus = CLUSTER, plan.machine.gpu, plan.machine.gpus
    commands = {
        "tokens": plan.token_command(places),
        "trainer": plan.trainer_command(places),
        "server": plan.server_command(places),
        "client": plan.client_command(places),
    }
    password = {"PGPASSWORD"} if cloud.store else set()
    secrets = sorted({*plan.secrets, *plan.trainer_secrets, *password})
    return {
        "plan": plan,
        "places": places,
        "commands": commands,
        "health": ["CMD", "python", "-c", HEALTH.format(port=places.port)][1:],
        "folder": folder.as_posix(),
        "up": "/".join(".." for _ in (*folder.parts, "target")),
        "uv": UV,
        "wheel": _wheel(),
        "estimate": _estimate(plan),
        "azure_size": _smallest(AZURE[gpu], gpus),
        "aws_type": _smallest(AWS[gpu], gpus),
        "accelerator": SKY[gpu],
        "cloud": cloud.name,
        "spot": cloud.spot,
        "sweep": "",
        "bucket": _bucket(plan),
        "left_out": sorted(LEFT_OUT),
        "store": cloud.store,
        "secrets": secrets,
        "command": _sky_command(plan, folder, cloud),
    }


def _smallest(machines: Mapping[int, str], gpus: int) -> str:
    return next(machines[count] for count in sorted(machines) if count >= gpus)


def _wheel() -> str:
    """Return the shell line that puts lightning's wheel into the context of the images."""
    kind, place = own_source()
    if kind == "wheel":
        return f'cp {shlex.quote(place)} "$wheels"'
    return f'uv build --quiet --wheel --out-dir "$wheels" {shlex.quote(place)}'


def _estimate(plan: DeployPlan) -> str:
    uses = [f"{use.role} {use.used / 1e9:.0f} of {use.available / 1e9:.0f} GB" for use in plan.machine.uses]
    return f"Each {plan.machine.gpu}: {', '.join(uses)}, estimated." if uses else "The GPU's memory was not estimated."


def _bucket(plan: DeployPlan) -> str:
    """Return the bucket's name. Names of buckets are global, so it has a digest of the project's folder."""
    own = hashlib.sha256(str(Path.cwd()).encode()).hexdigest()[:8]
    return f"lightning-{plan.name}-{own}"


def _sky_command(plan: DeployPlan, folder: Path, cloud: Cloud) -> str:
    out = f"/runs/{plan.name}" if cloud.spot else f"runs/{plan.name}"
    rest = [out, plan.agent, *plan.train, "--out", out]  # agents run on the trainer's machine
    # Run by `sh`: SkyPilot sends the project through a bucket, which keeps no permissions.
    line = shlex.join(["sh", f"{folder.as_posix()}/scripts/train-or-resume", *rest])
    return f'{line} --store "$LIGHTNING_STORE"' if cloud.store else line


RECORD = ".generated.json"
"""Name of the file with the digests of the files as they were generated."""


@dataclass(frozen=True, slots=True)
class Written:
    """Paths of the files that were written, were unchanged, or were kept because the user edited them."""

    written: tuple[str, ...]
    unchanged: tuple[str, ...]
    kept: tuple[str, ...]


def write(files: Mapping[str, str], folder: Path, *, force: bool = False) -> Written:
    """Write the files that are new or that nobody has edited; with `force`, all."""
    digests: dict[str, str] = read_json(folder / RECORD) or {}
    written, unchanged, kept = [], [], []
    for name, text in files.items():
        there = _read(folder / name)
        edited = there is not None and digests.get(name) != _digest(there)
        if there == text:
            unchanged.append(name)
        elif edited and not force:
            kept.append(name)
            continue
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
            written.append(name)
        if Path(name).name in SCRIPTS:
            (folder / name).chmod(0o755)
        digests[name] = _digest(text)
    if any(name.startswith("scripts/") for name in files):
        (folder / "wheels").mkdir(exist_ok=True)  # for lightning's own, which build.sh and apply.sh make
    (folder / RECORD).write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return Written(tuple(written), tuple(unchanged), tuple(kept))


def diff(files: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Yield a diff of the files in the folder and the generated ones: what writing would change."""
    for name, text in files.items():
        there = _read(folder / name)
        if there != text:
            before = [] if there is None else there.splitlines(keepends=True)
            shown = "/dev/null" if there is None else f"{folder}/{name}"
            yield from difflib.unified_diff(
                before, text.splitlines(keepends=True), shown, f"{folder}/{name}, generated"
            )


def _read(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

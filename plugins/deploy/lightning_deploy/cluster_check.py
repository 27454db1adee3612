"""What a cluster has to have before anything is applied: GPUs on one node, and a network plugin that enforces policies.

The invariant: it only reads (`kubectl get`). What cannot be seen is said, not assumed to be there. Whether the GPUs are free
is the cluster's affair: a pod waits for them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from lightning.errors import ConfigError

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
"""Names of network plugins, or of their parts, that enforce NetworkPolicy."""


def check_cluster(gpus: int, *, isolated: bool = True) -> list[str]:
    """What it found, in words. Raises `ConfigError` for a cluster in which the training could not run, or agents would not be
    kept apart; the latter only if that is wanted (`isolated`)."""
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
        for enforcer in ENFORCERS:
            if any(enforcer in name for name in names) and not _turned_off(containers):
                return enforcer
    return ""


def _turned_off(containers: list[dict[str, Any]]) -> bool:
    """Whether EKS' plugin is there and told to do nothing."""
    return any("--enable-network-policy=false" in one.get("args", ()) for one in containers)


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

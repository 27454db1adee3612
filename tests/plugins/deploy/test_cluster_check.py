"""What is looked for in a cluster before anything is applied; kubectl is a script with recorded replies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.errors import ConfigError
from lightning_deploy.validators import check_cluster

KUBECTL = """#!/bin/sh
[ "$1" = get ] || exit 9
cat "{folder}/$2.json" 2>/dev/null || {{ echo "Unable to connect to the server: dial tcp: i/o timeout" >&2; exit 1; }}
"""


class Cluster:
    """The replies of a cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def nodes(self, *gpus: int) -> None:
        items = [{"status": {"allocatable": {"cpu": "8"} | ({"nvidia.com/gpu": str(n)} if n else {})}} for n in gpus]
        self.reply("nodes", items)

    def daemonset(self, name: str, *containers: dict[str, Any]) -> None:
        spec = {"template": {"spec": {"containers": list(containers)}}}
        self.reply("daemonsets", [{"metadata": {"name": name}, "spec": spec}])

    def reply(self, what: str, items: list[dict[str, Any]]) -> None:
        (self.folder / f"{what}.json").write_text(json.dumps({"items": items}))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    (tmp_path / "kubectl").write_text(KUBECTL.format(folder=tmp_path))
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Cluster(tmp_path)


def test_a_cluster_with_gpus_and_policies_passes(cluster: Cluster) -> None:
    cluster.nodes(0, 8)
    cluster.daemonset("cilium", {"name": "cilium-agent", "image": "quay.io/cilium/cilium:v1.18"})
    assert check_cluster(4) == ["8 GPU(s) on one of 2 nodes", "network policies are enforced by cilium"]


@pytest.mark.parametrize(("gpus", "said"), [((0, 0), "has is 0"), ((4, 4), "has is 4"), ((), "it shows no node")])
def test_a_cluster_without_the_gpus_on_one_node_is_refused(cluster: Cluster, gpus: tuple[int, ...], said: str) -> None:
    cluster.nodes(*gpus)
    with pytest.raises(ConfigError, match=f"needs 8 GPU.*{said}.*scaled to zero"):
        check_cluster(8)


@pytest.mark.parametrize(
    "container",
    [
        {"name": "kube-proxy", "image": "registry.k8s.io/kube-proxy"},
        {"name": "aws-network-policy-agent", "image": "eks", "args": ["--enable-network-policy=false"]},
    ],
)
def test_a_cluster_that_would_ignore_the_policies_is_refused(cluster: Cluster, container: dict[str, Any]) -> None:
    cluster.nodes(1)
    cluster.daemonset("aws-node", container)
    with pytest.raises(ConfigError, match=r"agents could reach the database and the internet.*--open-network"):
        check_cluster(1)
    assert check_cluster(1, isolated=False)[1] == "NETWORK POLICIES ARE NOT ENFORCED"


def test_eks_enforces_what_its_agent_is_told_to(cluster: Cluster) -> None:
    cluster.nodes(1)
    cluster.daemonset("aws-node", {"name": "aws-network-policy-agent", "args": ["--enable-network-policy=true"]})
    assert check_cluster(1)[1] == "network policies are enforced by aws-network-policy-agent"


def test_a_cluster_that_does_not_answer_is_told_in_kubectls_words(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="kubectl get nodes failed: Unable to connect to the server"):
        check_cluster(1)

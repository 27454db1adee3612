"""What the runner puts into a cluster: settings and template become one pod, and ours wins where it must."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.config import load_config
from lightning.config.plugin_settings import RunnerConfig
from lightning.errors import ConfigError
from lightning.store.protocol import Store
from lightning_k8s.config import KubernetesConfig
from lightning_k8s.manifests import Manifests, label_of, name_for, read_template
from lightning_server.protocol import Site

SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "the-secret", "uid": "u"}}
SITE = Site("http://lightning:8000", "lt_1_secret", "run-1", cast("Store", None))

TEMPLATE = """
apiVersion: v1
kind: Pod
metadata:
  labels: {team: search, lightning/run: mine}
  annotations: {note: theirs}
spec:
  restartPolicy: Always
  automountServiceAccountToken: true
  tolerations: [{key: spot, operator: Exists}]
  nodeSelector: {disk: ssd}
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
  containers:
    - name: proxy
      image: proxy:2
    - name: runner
      image: theirs:1
      command: [sleep, infinity]
      args: ["1"]
      workingDir: /app
      securityContext: {runAsUser: 1000}
      resources: {requests: {cpu: "1", memory: 1Gi}}
      volumeMounts: [{name: data, mountPath: /data}]
      env:
        - {name: API_KEY, valueFrom: {secretKeyRef: {name: keys, key: api}}}
        - {name: MODE, value: theirs}
        - {name: LIGHTNING_TOKEN, value: forged}
"""


def manifests(template: dict[str, Any] | None = None, runner: dict[str, Any] | None = None, **k8s: Any) -> Manifests:
    config = RunnerConfig(**(runner or {}), k8s=KubernetesConfig(**{"image": "agents:1", **k8s}))
    return Manifests(SITE, config, "my_app:agent", template or {})


def test_settings_alone_make_a_pod() -> None:
    made = manifests(
        service_account="agents",
        node_selector={"kubernetes.io/arch": "amd64"},
        env={"MODE": "fast"},
        requests={"cpu": "2"},
        limits={"memory": "4Gi"},
        image_pull_secrets=("registry",),
    )
    pod = made.pod(SECRET, 8)
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert pod["metadata"]["labels"]["lightning/run"] == label_of(SITE)
    assert pod["metadata"]["annotations"]["lightning/run-id"] == "run-1"
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("agents", False)
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Never", 45)
    assert container["image"] == "agents:1"
    assert container["resources"] == {"requests": {"cpu": "2"}, "limits": {"memory": "4Gi"}}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    env = {item["name"]: item for item in container["env"]}
    assert env["MODE"]["value"] == "fast"
    assert env["LIGHTNING_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "the-secret", "key": "token"}


def test_a_template_keeps_what_it_says_where_it_may(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(TEMPLATE)
    made = manifests(read_template(str(file)), image="", env={"MODE": "ours"}, requests={"cpu": "3"})
    for body in (made.pod(SECRET, 8), made.job(SECRET)["spec"]["template"]):
        spec, labels = body["spec"], body["metadata"]["labels"]
        runner, proxy = spec["containers"]
        assert (labels["team"], labels["lightning/run"]) == ("search", label_of(SITE))
        assert body["metadata"]["annotations"]["note"] == "theirs"
        assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", True)
        assert spec["tolerations"]
        assert spec["volumes"]
        assert proxy == {"name": "proxy", "image": "proxy:2"}
        assert (runner["image"], runner["workingDir"], runner["volumeMounts"][0]["mountPath"]) == (
            "theirs:1",
            "/app",
            "/data",
        )
        assert runner["command"][:2] == ["lightning", "runner"]
        assert runner["args"] == []
        assert runner["securityContext"] == {"runAsUser": 1000}
        assert runner["resources"] == {"requests": {"cpu": "3", "memory": "1Gi"}}
        env = {item["name"]: item for item in runner["env"]}
        assert len(env) == len(runner["env"])
        assert "valueFrom" in env["API_KEY"]
        assert env["MODE"]["value"] == "ours"
        assert "value" not in env["LIGHTNING_TOKEN"]


def test_clients_get_the_trainers_settings_as_a_client_reads_them() -> None:
    given_settings = {
        "timeout": 12.5,
        "lease_ttl": 7.0,
        "drain": 3.0,
        "adapters": ("langchain", 'odd "name"\\'),
        "preload": ("my_app",),
        "tool_limits": {"browser": 2, 'a "web" search': 1},
    }
    made = manifests(runner=given_settings)
    env = {
        item["name"]: item["value"] for item in made.pod(SECRET, 1)["spec"]["containers"][0]["env"] if "value" in item
    }
    read = load_config(env=env).runner
    assert {name: getattr(read, name) for name in given_settings} == given_settings
    assert "LIGHTNING_RUNNER__ADAPTERS" not in str(manifests().pod(SECRET, 1))  # null stays unset: all that are found


def test_a_job_ends_by_itself() -> None:
    job = manifests(runner={"timeout": 100.0, "lease_ttl": 20.0, "drain": 10.0}, start_timeout=50.0).job(SECRET)
    assert job["spec"]["activeDeadlineSeconds"] == 50 + 20 + 30 + 100 + 10 + 60
    assert job["spec"]["backoffLimit"] == 0  # who tries again is the lease protocol
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    assert job["metadata"]["ownerReferences"][0]["uid"] == "u"
    assert "ownerReferences" not in job["spec"]["template"]["metadata"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: Deployment\nspec: {}", "is no Pod"),
        ("[1, 2]", "is no Pod"),
        ("spec: 3", "its spec is no mapping"),
        ("a: [", "is not YAML"),
        ("{}\n---\n{}", "is not YAML of one document"),
    ],
)
def test_a_template_that_is_no_pod_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_template(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_template(str(tmp_path / "none.yaml"))


def test_what_makes_no_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no image for the runner pods: set runner.k8s.image"):
        manifests(image="")
    two = {"spec": {"containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]}}
    with pytest.raises(ConfigError, match="call the one of the agents 'runner'"):
        manifests(two)


def test_a_pod_template_and_a_single_container_of_any_name_will_do(tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("kind: PodTemplate\ntemplate: {spec: {containers: [{name: app, image: 'x:1'}]}}")
    (container,) = manifests(read_template(str(file)), image="").pod(SECRET, 1)["spec"]["containers"]
    assert (container["name"], container["image"]) == ("runner", "x:1")


@given(st.text(), st.text(), st.booleans())
def test_any_run_on_any_server_has_a_label_and_names_of_its_own(run: str, other: str, same_server: bool) -> None:
    sites = [replace(SITE, run=run), replace(SITE, run=other, server=SITE.server if same_server else "http://another")]
    for site in sites:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", label_of(site))
        for name in (name_for(site), name_for(site, "token")):
            assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name)
        assert name_for(site) != name_for(site)
    same = run == other and same_server
    assert (label_of(sites[0]) == label_of(sites[1])) == same
    assert (name_for(sites[0], "token") == name_for(sites[1], "token")) == same

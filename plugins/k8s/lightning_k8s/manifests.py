"""The objects that the runner creates in the cluster: a Secret with the clients' token, pods, Jobs.

The invariant: every object of a run has its label and is owned by its Secret, so that the cluster deletes all when the Secret
is deleted. A template's values stay, unless the container would then not be a client of this run.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.config import RunnerConfig
from lightning.config.fields import toml_value
from lightning.errors import ConfigError
from lightning.safe_text import read_text

from lightning_k8s.cluster import Object
from lightning_k8s.config import KubernetesConfig

if TYPE_CHECKING:
    from lightning_server.protocol import Site

CONTAINER = "runner"
RUN_LABEL = "lightning/run"
TOKEN_KEY = "token"  # noqa: S105 — a name, not a secret
OURS = frozenset({"concurrency", "max_attempts", "prompts", "ray", "k8s"})
"""Settings of `runner` that clients do not get from the trainer: a client has its own share of them, or does not need them."""

_LABELS = {
    "app.kubernetes.io/name": "lightning",
    "app.kubernetes.io/component": "runner",
    "app.kubernetes.io/managed-by": "lightning",
}


def label_of(site: Site) -> str:
    """Return the value of the label of a run's objects: at most 63 letters, digits, `-`, `.`.

    It differs for runs of one name on two servers, also of two databases, since one namespace may serve both.
    """
    plain = re.sub(r"[^a-z0-9.-]+", "-", site.run.lower()).strip("-.")[:40].strip("-.")
    whole = f"{site.run}\n{site.server}"
    digest = hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{plain}-{digest}" if plain else digest


def name_for(site: Site, part: str = "") -> str:
    """Return a name for an object of a run, at most 63 characters: a new random one, or with `part` always the same."""
    return f"lightning-{label_of(site)[-36:].lstrip('-.')}-{part or secrets.token_hex(4)}".replace(".", "-")


def read_template(path: str) -> Object:
    """Read the pod in a YAML file; empty without a path. Raises `ConfigError` for a file that has no pod."""
    import yaml  # type: ignore[import-untyped]

    if not path:
        return {}
    try:
        found = yaml.safe_load(read_text(Path(path), ConfigError))
    except OSError as error:
        raise ConfigError(f"runner.k8s.template {path} cannot be read: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"runner.k8s.template {path} is not YAML of one document: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("template"), dict):  # a PodTemplate
        found = found["template"]
    if not isinstance(found, dict) or found.get("kind", "Pod") not in ("Pod", "PodTemplate"):
        raise ConfigError(f"runner.k8s.template {path} is no Pod: write one with metadata and spec")
    for name in ("metadata", "spec"):
        if not isinstance(found.get(name) or {}, dict):
            raise ConfigError(f"runner.k8s.template {path}: its {name} is no mapping")
    return cast("Object", found)


@dataclass(frozen=True, slots=True)
class Manifests:
    """Makes the objects of one run. `agent` is `module:name` in the image.

    Raises `ConfigError` when settings and template together do not make a pod.
    """

    site: Site
    config: RunnerConfig
    agent: str
    template: Object

    def __post_init__(self) -> None:
        containers = (self.template.get("spec") or {}).get("containers") or []
        if len(containers) > 1 and not any(one.get("name") == CONTAINER for one in containers):
            raise ConfigError(f"runner.k8s.template has several containers: call the one of the agents {CONTAINER!r}")
        if not self._container().get("image"):
            raise ConfigError(
                "no image for the runner pods: set runner.k8s.image to one that has lightning and the agent "
                "(docs/runners.md has a Dockerfile)"
            )

    @property
    def grace(self) -> int:
        """Seconds from SIGTERM until a client is killed: it drains, and gives its leases back."""
        return int(self.config.drain) + 15

    @property
    def selector(self) -> str:
        """The label selector for the objects of this run."""
        return f"{RUN_LABEL}={label_of(self.site)}"

    @property
    def secret_name(self) -> str:
        """The name of the run's Secret. It never changes, so that a later trainer finds what an earlier one left behind."""
        return name_for(self.site, "token")

    def secret(self, owner: Object | None) -> Object:
        """Return the Secret with the clients' token, which owns all other objects. `owner` is the trainer's pod when it runs in
        one."""
        token = base64.b64encode(self.site.token.encode()).decode()
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata(self.secret_name, owner),
            "type": "Opaque",
            "data": {TOKEN_KEY: token},
        }

    def pod(self, secret: Object, concurrency: int) -> Object:
        """Return a pod of the pool: a client that runs `concurrency` agents until it is told to end."""
        body = self._pod(secret, ["--concurrency", str(concurrency)])
        metadata = self._metadata(name_for(self.site), secret, body["metadata"])
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body["spec"]}

    def job(self, secret: Object) -> Object:
        """Return a Job whose client runs one rollout. A failed Job is not repeated by the cluster, since its rollout is leased
        again.

        It waits for a rollout a little longer than a lease lasts, because the rollout of a dead client can be leased only then.
        """
        idle = self.config.lease_ttl + 30
        body = self._pod(secret, ["--concurrency", "1", "--rollouts", "1", "--idle", f"{idle:g}"])
        limit = KubernetesConfig.of(self.config).start_timeout + idle + self.config.timeout + self.config.drain
        spec = {
            "backoffLimit": 0,
            "activeDeadlineSeconds": int(limit) + 60,
            "ttlSecondsAfterFinished": 600,
            "template": body,
        }
        metadata = self._metadata(name_for(self.site), secret)
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}

    def _metadata(self, name: str, owner: Object | None, given: Mapping[str, Any] | None = None) -> Object:
        metadata: Object = {"name": name, **self._marks(given or {})}
        if owner is not None:
            reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
            metadata["ownerReferences"] = [
                {**reference, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
            ]
        return metadata

    def _pod(self, secret: Object, arguments: list[str]) -> Object:
        k8s = KubernetesConfig.of(self.config)
        given = self.template.get("spec") or {}
        spec: Object = {
            "automountServiceAccountToken": False,  # agents need no access to the cluster
            "enableServiceLinks": False,
            **given,
            "restartPolicy": "Never",  # the keeper replaces pods, after it has read how they ended
            "terminationGracePeriodSeconds": self.grace,
        }
        if k8s.service_account:
            spec["serviceAccountName"] = k8s.service_account
        if k8s.node_selector:
            spec["nodeSelector"] = {**(given.get("nodeSelector") or {}), **k8s.node_selector}
        if k8s.image_pull_secrets:
            spec["imagePullSecrets"] = [{"name": name} for name in k8s.image_pull_secrets]
        ours = self._container()
        others = [one for one in given.get("containers") or () if one is not self._given_container()]
        spec["containers"] = [
            {**ours, "command": self._command(arguments), "args": [], "env": self._env(secret, ours)},
            *others,
        ]
        return {"metadata": self._marks(self.template.get("metadata") or {}), "spec": spec}

    def _marks(self, given: Mapping[str, Any]) -> Object:
        """Return the given labels and annotations with those of the run."""
        return {
            "labels": {**(given.get("labels") or {}), **_LABELS, RUN_LABEL: label_of(self.site)},
            "annotations": {**(given.get("annotations") or {}), "lightning/run-id": self.site.run},
        }

    def _given_container(self) -> Mapping[str, Any] | None:
        containers = (self.template.get("spec") or {}).get("containers") or []
        named = next((one for one in containers if one.get("name") == CONTAINER), None)
        return named if named is not None or not containers else cast("Mapping[str, Any]", containers[0])

    def _container(self) -> Object:
        """Return the client's container, without its command and environment."""
        k8s = KubernetesConfig.of(self.config)
        given = self._given_container() or {}
        container: Object = {
            "terminationMessagePolicy": "FallbackToLogsOnError",  # the end of the log becomes part of the pod's status
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            **given,
            "name": CONTAINER,
        }
        if k8s.image:
            container["image"] = k8s.image
        resources = dict(given.get("resources") or {})
        for name, values in (("requests", k8s.requests), ("limits", k8s.limits)):
            if values:
                resources[name] = {**(resources.get(name) or {}), **values}
        return {**container, "resources": resources} if resources else container

    def _command(self, arguments: list[str]) -> list[str]:
        return ["lightning", "runner", "--server", self.site.server, "--run", self.site.run, *arguments, self.agent]

    def _env(self, secret: Object, container: Object) -> list[Object]:
        """Return the environment: the template's variables, then those of the settings and the runner's own, each name once."""
        runner, plain = self.config.model_dump(mode="json"), type(self.config)().model_dump(mode="json")
        ours: dict[str, Object] = {
            name: {"value": value} for name, value in KubernetesConfig.of(self.config).env.items()
        }
        for name in sorted(runner.keys() - OURS):
            told = name in RunnerConfig.model_fields or runner[name] != plain[name]
            if runner[name] is not None and told:
                ours[f"LIGHTNING_RUNNER__{name.upper()}"] = {"value": toml_value(runner[name])}
        reference = {"name": secret["metadata"]["name"], "key": TOKEN_KEY}
        ours["LIGHTNING_TOKEN"] = {"valueFrom": {"secretKeyRef": reference}}
        theirs = [one for one in container.get("env") or () if one.get("name") not in ours]
        return [*theirs, *({"name": name, **value} for name, value in ours.items())]

"""The API of a Kubernetes cluster, as far as the runner uses it: authentication, requests, watches.

The invariant: every failure becomes a `ClusterError` that says what was being done, what the cluster said, whether repeating
the request can help, and what a person can do.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from lightning.errors import ConfigError, MissingExtraError, RunnerError

from lightning_k8s.config import KubernetesConfig

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient, Configuration

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 30.0
WATCH_SECONDS = 300
"""The API ends a watch after this many seconds, and it is begun again; a dead connection is noticed `REQUEST_SECONDS` later."""

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CURE = "docs/runners.md has the Role that the trainer needs"

_ONE = {"pods": "a pod", "jobs": "a Job", "secrets": "the Secret"}

Object = dict[str, Any]
"""A Kubernetes object in the API's JSON."""


class ClusterError(RunnerError):
    """A request that failed. `status` is the HTTP status (0: no answer); `again` says whether the same request may succeed
    later."""

    def __init__(self, text: str, status: int = 0, again: bool = False) -> None:
        super().__init__(text)
        self.status, self.again = status, again

    def __reduce__(self) -> tuple[type[ClusterError], tuple[str, int, bool]]:
        return (type(self), (str(self), self.status, self.again))


class Cluster:
    """A connection to the API, made by `connect`. `namespace` is where all the runner's objects are."""

    def __init__(self, config: KubernetesConfig, settings: Configuration, client: ApiClient, namespace: str) -> None:
        self._config, self._settings, self._client = config, settings, client
        self.namespace = namespace

    @property
    def host(self) -> str:
        """The API's address."""
        return str(self._settings.host)

    async def close(self) -> None:
        """End all connections."""
        await self._client.close()

    async def create(self, path: str, body: Object) -> Object:
        """Create an object in `path` (`pods`, `jobs`, `secrets`), or return the existing one of this name.

        An existing Secret is deleted and created again, because the runner does not ask for the right to read Secrets.
        """
        name = body["metadata"]["name"]
        try:
            return await self._call("POST", path, f"creating {_ONE[path]}", body=body)
        except ClusterError as error:
            if error.status != 409:  # ours: names are random, and an answer may have been lost
                raise
        if path != "secrets":
            return await self.get(path, name)
        await self.delete(path, name)
        return await self._call("POST", path, f"creating {_ONE[path]}", body=body)

    async def get(self, path: str, name: str) -> Object:
        """Return one object. Raises `ClusterError` with status 404 when there is none."""
        return await self._call("GET", f"{path}/{name}", f"reading {name}")

    async def list(self, path: str, selector: str) -> tuple[list[Object], str]:
        """Return the objects with a label, and the version of the list from which to watch."""
        query = [("labelSelector", selector)]
        page = await self._call("GET", path, f"listing {path}", query=query)
        return list(page.get("items") or ()), str(page["metadata"]["resourceVersion"])

    async def delete(self, path: str, name: str, grace: int | None = None) -> None:
        """Delete an object and the objects it owns. `grace` is the seconds that its processes get; None: their default. An
        object that does not exist is no error."""
        body: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            await self._call("DELETE", f"{path}/{name}", f"deleting {_ONE[path]}", body=body)
        except ClusterError as error:
            if error.status != 404:
                raise

    async def watch(self, path: str, selector: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield changes since `version`, as `(ADDED | MODIFIED | DELETED, object)`, until the API ends the watch.

        Raises `ClusterError` with status 410 when `version` is too old: list again.
        """
        query = [
            ("watch", "1"),
            ("labelSelector", selector),
            ("resourceVersion", version),
            ("timeoutSeconds", str(WATCH_SECONDS)),
        ]
        limits = aiohttp.ClientTimeout(connect=REQUEST_SECONDS, sock_read=WATCH_SECONDS + REQUEST_SECONDS)
        doing = f"watching {path}"
        async with self._open("GET", path, doing, query=query, timeout=limits) as response:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise self._refusal(doing, int(event["object"].get("code") or 500), event["object"])
                yield event["type"], event["object"]

    async def _call(
        self, method: str, path: str, doing: str, *, body: Object | None = None, query: Sequence[tuple[str, str]] = ()
    ) -> Object:
        limits = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with self._open(method, path, doing, body=body, query=query, timeout=limits) as response:
            answer: Object = json.loads(await response.read())
            return answer

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        doing: str,
        *,
        timeout: aiohttp.ClientTimeout,
        body: Object | None = None,
        query: Sequence[tuple[str, str]] = (),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a request and return its response, whose status is below 400. Raises `ClusterError` for any other status and for
        an error while the body is read."""
        group = "/apis/batch/v1" if path.partition("/")[0] == "jobs" else "/api/v1"
        place = f"{group}/namespaces/{self.namespace}/{path}"
        try:
            response = await self._send(method, place, body, query, timeout)
            if response.status == 401:  # credentials that expire are renewed by reading the kubeconfig again
                response.release()
                await _authenticate(self._config, self._settings)
                response = await self._send(method, place, body, query, timeout)
            async with response:
                if response.status >= 400:
                    raise self._refusal(doing, response.status, _status_of(await response.read()))
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as error:
            said = str(error) or type(error).__name__
            raise ClusterError(
                f"{doing}: the Kubernetes API at {self.host} did not answer: {said}", again=True
            ) from error

    async def _send(
        self,
        method: str,
        place: str,
        body: Object | None,
        query: Sequence[tuple[str, str]],
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await self._client.call_api(
            place,
            method,
            query_params=list(query),
            header_params={"Accept": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=timeout,
        )
        return response

    def _refusal(self, doing: str, status: int, said: Mapping[str, Any]) -> ClusterError:
        message = str(said.get("message") or said.get("reason") or f"HTTP {status}")
        again = status in (408, 409, 410, 429) or status >= 500
        cure = ""
        if status == 401:
            cure = ". The credentials are not accepted: renew them, or name others by runner.k8s.kubeconfig or .context"
        elif status == 403 and "exceeded quota" in message:
            again, cure = True, ". Raise the namespace's quota, or lower runner.k8s.pods or runner.k8s.requests"
        elif status == 403 and "cannot" in message:
            cure = f". {CURE}"
        elif status in (403, 422):
            cure = ". Change runner.k8s or its template so that the cluster admits the pod"
        elif status == 404 and "namespaces" in message:
            cure = ". Create the namespace, or name another one by runner.k8s.namespace"
        text = f"{doing} in namespace {self.namespace!r}: the cluster said {status}: {message}{cure}"
        return ClusterError(text, status, again)


async def connect(config: KubernetesConfig) -> Cluster:
    """Load the credentials and return a connection; no request is sent yet.

    Raises `MissingExtraError` without the extra `k8s`, `ConfigError` when no cluster can be found.
    """
    try:
        from kubernetes_asyncio.client import ApiClient, Configuration
    except ImportError as error:
        raise MissingExtraError("k8s", "kubernetes_asyncio") from error

    settings = Configuration()
    namespace = await _authenticate(config, settings)
    return Cluster(config, settings, ApiClient(settings), config.namespace or namespace)


async def _authenticate(config: KubernetesConfig, settings: Configuration) -> str:
    """Write the cluster's address and credentials into `settings`, and return their namespace."""
    from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

    try:
        if inside(config):
            load_incluster_config(settings)  # type: ignore[no-untyped-call]
            return (ACCOUNT / "namespace").read_text().strip()
        file = config.kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        _check_there(file)
        await load_kube_config(file, config.context or None, settings, persist_config=False)
        return _namespace(file, config.context)
    except (ConfigException, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no Kubernetes cluster to run agents in: {error}. Run the trainer in a pod with a service account, or name a "
            "kubeconfig by runner.k8s.kubeconfig (and runner.k8s.context)"
        ) from error


def _check_there(file: str) -> None:
    """Raise `FileNotFoundError` when no kubeconfig exists, which the loader would take for an empty one."""
    if not any(Path(part).is_file() for part in file.split(os.pathsep)):
        raise FileNotFoundError(f"there is no kubeconfig at {file}")


def inside(config: KubernetesConfig) -> bool:
    """Whether this process runs in a pod and uses the pod's service account."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and not (config.kubeconfig or config.context)


def _namespace(file: str, context: str) -> str:
    from kubernetes_asyncio.config import list_kube_config_contexts

    contexts, active = list_kube_config_contexts(file)
    chosen = next((one for one in contexts if one["name"] == context), None) if context else active
    found = (chosen or {}).get("context", {}).get("namespace")
    return str(found or "default")


def _status_of(data: bytes) -> Mapping[str, Any]:
    """Return the API's `Status` in a body, or a proxy's text as its message."""
    try:
        said = json.loads(data)
    except ValueError:
        return {"message": data[:300].decode("utf-8", "replace")}
    return said if isinstance(said, dict) else {"message": str(said)[:300]}

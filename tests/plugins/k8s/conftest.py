"""A Kubernetes API with the few endpoints that the runner uses, and a kubelet and a Job controller that tests can steer."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from aiohttp import web

from tests.core.runner.conftest import _nothing_is_left_behind, lease  # noqa: F401 — fixtures

Object = dict[str, Any]


def _role() -> dict[str, list[str]]:
    """The verbs by kind of the Role in docs/runners.md: nobody here may do more."""
    page = (Path(__file__).parents[3] / "docs" / "runners.md").read_text()
    written = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (role,) = [one for block in written for one in yaml.safe_load_all(block) if one["kind"] == "Role"]
    return {kind: rule["verbs"] for rule in role["rules"] for kind in rule["resources"]}


ROLE = _role()


class FakeCluster:
    """Objects by kind and name. `kubelet(pod)` gives the status that a new pod gets at once; None leaves it pending."""

    RUNNING: ClassVar[Object] = {
        "phase": "Running",
        "containerStatuses": [{"name": "runner", "state": {"running": {}}}],
    }

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {"pods": {}, "jobs": {}, "secrets": {}, "podtemplates": {}}
        self.made: list[Object] = []
        self.deletions: list[str] = []
        self.graces: list[int | None] = []  # of the deletions
        self.requests: list[tuple[str, str]] = []
        self.refusals: list[tuple[str, str, int, str]] = []  # method, kind, status, message; each is used once
        self.always_refuse: list[tuple[str, str, int, str]] = []
        self.too_old = 0  # as many watches are told so
        self.token, self.url = "open sesame", ""
        self.lose_answers = 0  # of as many creations
        self.vanish = 0  # as many pods, before their creation is answered
        self.kubelet: Callable[[Object], Object | None] = lambda _: self.RUNNING
        self.versions = itertools.count(1)
        self.uids = itertools.count(1)
        self.watchers: list[tuple[str, asyncio.Queue[Object | None]]] = []
        self.past: list[tuple[str, int, Object]] = []  # what was told, of which kind, at which version

    @staticmethod
    def ended(code: int = 1, message: str = "", reason: str = "Error") -> Object:
        state = {"terminated": {"exitCode": code, "reason": reason if code else "Completed", "message": message}}
        return {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "runner", "state": state}],
        }

    @staticmethod
    def waiting(reason: str, message: str = "") -> Object:
        state = {"waiting": {"reason": reason, "message": message}}
        return {"phase": "Pending", "containerStatuses": [{"name": "runner", "state": state}]}

    # what tests do ----------------------------------------------------------------------------------------------
    def pods(self) -> list[Object]:
        return list(self.objects["pods"].values())

    def say(self, name: str, status: Object) -> None:
        """The kubelet reports a pod's status."""
        pod = self.objects["pods"][name]
        pod["status"] = status
        self._changed("MODIFIED", "pods", pod)
        for owner in pod["metadata"].get("ownerReferences", ()):
            if owner["kind"] == "Job" and status["phase"] in ("Succeeded", "Failed"):
                job = self.objects["jobs"][owner["name"]]
                kind = "Complete" if status["phase"] == "Succeeded" else "Failed"
                job["status"] = {"conditions": [{"type": kind, "status": "True", "reason": "BackoffLimitExceeded"}]}
                self._changed("MODIFIED", "jobs", job)

    def remove(self, kind: str, name: str) -> None:
        """Delete an object and, as the garbage collector does, everything it owns."""
        gone = self.objects[kind].pop(name)
        self._changed("DELETED", kind, gone)
        for other in self.objects:
            for body in list(self.objects[other].values()):
                owners = body["metadata"].get("ownerReferences", ())
                if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                    self.remove(other, body["metadata"]["name"])

    def cut(self) -> None:
        """Every watch breaks."""
        for _, queue in self.watchers:
            queue.put_nowait(None)

    # the API ----------------------------------------------------------------------------------------------------
    def _changed(self, event: str, kind: str, body: Object) -> None:
        version = next(self.versions)
        body["metadata"]["resourceVersion"] = str(version)
        told = {"type": event, "object": copy.deepcopy(body)}
        self.past.append((kind, version, told))
        for watched, queue in self.watchers:
            if watched == kind:
                queue.put_nowait(told)

    def add(self, kind: str, body: Object) -> Object:
        body["metadata"]["uid"] = f"uid-{next(self.uids)}"
        self.objects[kind][body["metadata"]["name"]] = body
        if kind == "pods":
            body["status"] = self.kubelet(body) or {"phase": "Pending"}
        self._changed("ADDED", kind, body)
        if kind == "jobs":
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": body["metadata"]["name"]}
            pod = copy.deepcopy(body["spec"]["template"])
            pod["metadata"] |= {
                "name": f"{body['metadata']['name']}-x",
                "ownerReferences": [{**owner, "uid": body["metadata"]["uid"]}],
            }
            self.add("pods", pod)
        return body

    def _refused(self, request: web.Request, kind: str) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        verb = {"POST": "create", "DELETE": "delete"}.get(request.method, "get")
        if verb == "get" and "name" not in request.match_info:
            verb = "watch" if request.query.get("watch") else "list"
        if verb not in ROLE.get(kind, ()):
            return _status(403, f'{kind} is forbidden: User "trainer" cannot {verb} resource "{kind}"')
        for place in (self.refusals, self.always_refuse):
            for refusal in place:
                method, of, status, message = refusal
                if (method, of) == (request.method, kind):
                    if place is self.refusals:
                        place.remove(refusal)
                    return _status(status, message)
        return None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kind, name = request.match_info["kind"], request.match_info.get("name", "")
        group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        assert request.path.startswith(f"{group}/namespaces/agents/"), request.path
        self.requests.append((request.method, kind))
        if (refused := self._refused(request, kind)) is not None:
            return refused
        if request.method == "POST":
            return await self._create(request, kind)
        if request.method == "DELETE":
            return await self._delete(request, kind, name)
        if name:
            found = self.objects[kind].get(name)
            return web.json_response(found) if found else _status(404, f'{kind} "{name}" not found')
        if request.query.get("watch"):
            return await self._watch(request, kind)
        body = {"metadata": {"resourceVersion": str(next(self.versions))}, "items": self._selected(request, kind)}
        return web.json_response(body)

    def _selected(self, request: web.Request, kind: str) -> list[Object]:
        label, _, value = request.query["labelSelector"].partition("=")
        return [body for body in self.objects[kind].values() if body["metadata"]["labels"].get(label) == value]

    async def _create(self, request: web.Request, kind: str) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        assert len(name) <= 63
        if name in self.objects[kind]:
            return _status(409, f'{kind} "{name}" already exists')
        self.made.append(copy.deepcopy(body))
        made = self.add(kind, body)
        if self.lose_answers:
            self.lose_answers -= 1
            assert request.transport is not None
            request.transport.close()
        if kind == "pods" and self.vanish:
            self.vanish -= 1
            self.remove(kind, name)
            await asyncio.sleep(0.05)
        return web.json_response(made, status=201)

    async def _delete(self, request: web.Request, kind: str, name: str) -> web.Response:
        if name not in self.objects[kind]:
            return _status(404, f'{kind} "{name}" not found')
        how = await request.json()
        assert how["propagationPolicy"] == "Background"
        self.graces.append(how.get("gracePeriodSeconds"))
        self.deletions.append(name)
        self.remove(kind, name)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if self.too_old:
            self.too_old -= 1
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        queue: asyncio.Queue[Object | None] = asyncio.Queue()
        since = int(request.query["resourceVersion"])
        for of, version, told in self.past:  # what happened between the list and the watch
            if of == kind and version > since:
                queue.put_nowait(told)
        self.watchers.append((kind, queue))
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self.watchers.remove((kind, queue))
        if request.transport is not None:
            request.transport.abort()
        return response

    def kubeconfig(self, folder: Path) -> str:
        """A kubeconfig with the present token, whose context is in the namespace `agents`."""
        file = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "agents"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": self.token}}],
        }
        file.write_text(json.dumps(config))
        return str(file)


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster()
    app = web.Application()
    for base in ("/api/v1", "/apis/batch/v1"):
        app.router.add_route("*", base + "/namespaces/{namespace}/{kind}", cluster.handle)
        app.router.add_route("*", base + "/namespaces/{namespace}/{kind}/{name}", cluster.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    cluster.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield cluster
    finally:
        cluster.cut()
        await runner.cleanup()

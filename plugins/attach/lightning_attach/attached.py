"""A vLLM that somebody else runs, as a `PolicyServer`.

The invariant: it takes weights from one trainer at a time, the one that attached last. This module never stops it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from pathlib import Path
from typing import cast

from lightning.asyncio_utils import end
from lightning.config import PolicyServerConfig
from lightning.errors import PolicyServerError
from lightning.policy_server.control import HEALTH_SECONDS, NoRoutesError, NotOursError, VLLMControl
from lightning.policy_server.model_folder import check_model_folder, read_facts
from lightning.policy_server.owner_secret import SECRET
from lightning.policy_server.parsers import parsers_for
from lightning.policy_server.vllm_arguments import EXTENSION as CORE_EXTENSION
from lightning.policy_server.vllm_server import LOOK_SECONDS, VLLMServer
from lightning.policy_server.weights import FromDisk, WeightTransfer

from lightning_attach.transfer import EXTENSION

logger = logging.getLogger(__name__)

TAKE_OVER_SECONDS = 5.0
"""Seconds that the weights of a server taken over from another trainer stay unchanged: that trainer's gateways check every two
seconds who owns it, and their calls until then must not be answered with our weights."""
SILENT_SECONDS = 300.0
"""Seconds for which a living trainer never leaves its vLLM paused with weights of one known version. Within this time it makes
a request that vLLM answers within `CONTROL_SECONDS`, or changes the weights; then they have no version, or vLLM answers
nobody."""
RETURN_SECONDS = 1800.0
"""Seconds for a vLLM that died to come back, unless `policy_server.start_timeout` is set."""
AWAKE_SECONDS = 5.0
"""Seconds between two checks of a vLLM that is not known to be paused."""


class AttachedControl(VLLMControl):
    """The control routes of a vLLM that others run: which model it serves, and which trainer owns its weights."""

    async def served_model(self) -> str:
        """Return the name of the first model that the vLLM serves."""
        answer = await self.call("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])  # type: ignore[index]
        except (KeyError, IndexError, TypeError) as error:
            raise PolicyServerError(f"{self.url}/v1/models names no model; is it a vLLM server?") from error

    async def parses_tools(self, model: str) -> bool:
        """Whether the vLLM accepts calls with optional tools: without a parser for tool calls it refuses them before it
        samples.

        The check samples one token. A missing answer counts as accepting.
        """
        tool = {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}}
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 1}
        try:
            await self.call("POST", "/v1/chat/completions", json=body, seconds=HEALTH_SECONDS)
        except PolicyServerError as error:
            return "--tool-call-parser" not in str(error)
        return True

    async def claim(self, claim: str, *over: str) -> tuple[int | None, str]:
        """Claim the vLLM's weights under the word `claim`. Return the version of its weights (None: unknown), and the claim
        before.

        Raises `NotOursError` when `over` is given and the claim before is none of these, nor empty.
        """
        try:
            answers = await self.rpc("lightning_claim", claim, *over)
            if any("before" not in answer for answer in answers):
                raise PolicyServerError("it does not say whose it was")
        except NotOursError:
            raise
        except PolicyServerError as error:
            raise PolicyServerError(
                f"the vLLM at {self.url} takes no claim of a trainer ({error}); if it was started with another release of "
                "lightning, start it again with this one"
            ) from error
        self.claimed_as = claim
        versions = {cast("int | None", answer.get("version")) for answer in answers}
        return versions.pop() if len(versions) == 1 else None, str(answers[0]["before"])

    async def dismiss(self, owner: str) -> None:
        """Remove a trainer's claim, so that it can load no more weights. Raises `NotOursError` where another claim is found."""
        await self.rpc("lightning_claim", "", owner, seconds=HEALTH_SECONDS)


class AttachedVLLM(VLLMServer):
    """A vLLM that somebody else runs, at `config.attach`. It must see the trainer's files under the same paths, unless
    `transfer` sends them (None: they are read from disk).

    It needs VLLM_SERVER_DEV_MODE=1, `--worker-extension-cls lightning.policy_server.worker.WorkerExtension` (for weights over
    the network `transfer.EXTENSION`), `--logprobs-mode processed_logprobs` and `--generation-config vllm`, on CUDA also
    VLLM_USE_V2_MODEL_RUNNER=0 and `--no-async-scheduling`; `start` refuses a vLLM without these. `model` is the folder it
    serves. If its control routes have a secret (`owner_secret`), that is in our environment, too.

    With `claims` only this process may change its weights from `start` on: it leaves a claim there, and a trainer that later
    finds another's claim stops. Of two trainers that attach at one moment the first is refused when it brings weights.
    """

    _control: AttachedControl | None

    def __init__(
        self, model: Path, config: PolicyServerConfig, transfer: WeightTransfer | None = None, *, claims: bool = True
    ) -> None:
        super().__init__(model.resolve(), 0, transfer or FromDisk())
        self._config, self._claims = config, claims
        self._root = cast("str", config.attach).rstrip("/").removesuffix("/v1")
        self._waking: asyncio.Task[None] | None = None

    async def start(self, *over: str) -> None:
        """Attach to the vLLM: find out its model and the version of its weights (-1: an update broke off, so the version is
        unknown).

        A server that a dead trainer left paused is resumed, unless its version is unknown: then it waits for `update`. A server
        of another trainer is taken over, which takes `TAKE_OVER_SECONDS`. Without `claims` a server that its trainer has
        paused, which may be in the middle of an update, is resumed only after the trainer was silent for `SILENT_SECONDS`. That
        is checked until `close`.

        With `over` raises `NotOursError` where another claim is found than one of these.
        """
        check_model_folder(self._folder)
        await asyncio.to_thread(self._transfer.check, None)
        control = AttachedControl(self._root, os.environ.get(SECRET, ""))
        state = await control.health()
        if state != "ok":
            raise PolicyServerError(
                f"no vLLM answers at policy_server.attach = {self._config.attach!r} (health: {state}); "
                "start it, or leave policy_server.attach empty to have one started"
            )
        self.model = await control.served_model()
        await control.check_settings(CORE_EXTENSION, EXTENSION, updates=self._claims)
        if self._claims:
            await control.check_one_engine()
        version = await (self._claim_it(control, *over) if self._claims else control.attach())
        self.version, self._weights = -1 if version is None else version, ()
        if version is not None and await control.is_paused():
            await self._wake(control)
        elif version is None and not self._claims:
            logger.warning(
                "the weights of the vLLM at %s are of no version: its trainer is changing them, and calls wait until it has; "
                "if it was killed meanwhile, resume its run, or start the vLLM again",
                self._root,
            )
        if not self._claims:
            await self._sleep_on()
            self._waking = asyncio.create_task(self._wake_when_silent(control), name="lightning-wake")
        self._control, self._serving = control, True
        await self._say_tools(control)

    async def _say_tools(self, control: AttachedControl) -> None:
        """Warn where the vLLM would refuse agents' tools although the model's chat template knows tools."""
        facts = await asyncio.to_thread(read_facts, self._folder)
        if facts.knows_tools and not await control.is_paused() and not await control.parses_tools(self.model):
            parser = parsers_for(facts).tool
            logger.warning(
                "the vLLM at %s has no parser for tool calls: it refuses calls with `tools`. If agents have any, start it "
                "again with --enable-auto-tool-choice --tool-call-parser %s",
                self._root,
                parser or "(that of the model's family)",
            )

    async def _wake(self, control: AttachedControl) -> None:
        """Resume a paused vLLM, unless this process claims nothing and a trainer owns it."""
        if not self._claims and (owner := await control.claimed()):
            logger.warning(
                "the vLLM at %s was paused by its trainer (its claim is %s), and calls wait until that has updated it; "
                "if the trainer was killed they go on in %g s, or as soon as its run is resumed",
                self._root,
                owner,
                SILENT_SECONDS,
            )
            return
        await control.resume()

    async def _sleep_on(self) -> None:
        if self._waking is not None:
            await end(self._waking)
            self._waking = None

    async def _wake_when_silent(self, control: AttachedControl) -> None:
        """Check a paused vLLM without end: where nothing about it changed for `SILENT_SECONDS`, its trainer was killed, so the
        trainer's claim is removed and the vLLM resumed."""
        seen: tuple[str, int] | None = None
        since = time.monotonic()
        while True:
            await asyncio.sleep(AWAKE_SECONDS if seen is None else LOOK_SECONDS)
            now = await self._paused_as(control)
            if now is None or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since >= SILENT_SECONDS:
                await self._take_and_resume(control, now[0])
                seen = None

    async def _paused_as(self, control: AttachedControl) -> tuple[str, int] | None:
        """Return the claim and the version of a paused vLLM; None where it is not paused, has no version, or does not
        answer."""
        try:
            if not await control.is_paused():
                return None
            version, owner = await control.attach(), await control.claimed()
        except PolicyServerError as error:
            logger.debug("%s does not say whether it is paused: %s", self._root, error)
            return None
        return None if version is None else (owner, version)

    async def _take_and_resume(self, control: AttachedControl, owner: str) -> None:
        try:
            await control.dismiss(owner)
            await control.resume()
        except PolicyServerError as error:
            logger.warning("%s stays paused until its trainer gives it weights: %s", self._root, error)
        else:
            logger.warning("the trainer of the vLLM at %s was silent for %g s: it goes on", self._root, SILENT_SECONDS)

    async def _claim_it(self, control: AttachedControl, *over: str) -> int | None:
        """Claim the vLLM's weights, and return their version (None: unknown)."""
        claim = secrets.token_hex(8)
        version, before = await control.claim(claim, *over)
        self.claim, self._control = claim, control  # from here on `close` removes the claim
        if before not in ("", *over):
            logger.warning(
                "the vLLM at %s is another trainer's, or was this run's when that was killed; taking it over in %g s",
                self._root,
                TAKE_OVER_SECONDS,
            )
            await asyncio.sleep(TAKE_OVER_SECONDS)
        return version

    async def restart(self, weights: Path | None, version: int) -> None:
        """Wait until whoever runs the vLLM has started it again, then load `weights` (None: the folder's) as `version`.

        Raises `PolicyServerError` when it does not come back, or when another trainer has attached to it.
        """
        seconds = self._config.start_timeout or RETURN_SECONDS
        deadline = time.monotonic() + seconds
        self._serving = False
        while await VLLMControl(self._root).health() != "ok":
            if time.monotonic() > deadline:
                raise PolicyServerError(f"the vLLM at {self._root} died and did not come back within {seconds:.0f} s")
            await asyncio.sleep(1.0)
        await self.start(*([self.claim] if self.claim else []))
        if weights is not None:
            await self.update(weights, version)
            return
        async with self._changing:
            await self._running().set_version(version)
        self.version = version

    async def _is_another(self, control: VLLMControl) -> bool:
        """Whether the vLLM was started again or belongs to another trainer now. False when it does not answer."""
        if self._changing.locked():
            return False
        try:
            await control.check_ours()
        except (NoRoutesError, NotOursError):
            return True
        except PolicyServerError as error:
            logger.debug("%s did not say whose it is: %s", self._root, error)
        return False

    def _give_up(self) -> str:
        return f"{self._root} stays paused, its weights are undefined; restart it and attach again"

    async def close(self) -> None:
        """Detach: remove the claim, so that the next trainer can attach at once. The vLLM goes on serving."""
        self._serving = False
        await self._sleep_on()
        if self._control is None or not self._control.claimed_as:
            return
        try:
            await self._control.dismiss(self._control.claimed_as)
        except PolicyServerError as error:
            logger.info("%s was not told that its trainer has gone: %s", self._root, error)

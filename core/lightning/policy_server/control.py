"""The HTTP client for a vLLM's control: its health, its RL routes, and the methods of our worker extension.

The invariant: a call returns what vLLM answered or raises `PolicyServerError` with the route and the reason; nothing is
retried, because an update must know which of its steps was done.

`client_key` maps the names that vLLM gives requests inside its engine back to the ids in `x-request-id`. Two requests of one
gateway never share a key, and a name that was not made by these rules stays as it is.

    chat completion    chatcmpl-{id}-{8 hex digits}
    completion         cmpl-{id}-{prompt}-{8 hex digits}
    with n > 1         {choice}_ in front of either

vLLM adds the digits itself (`InputProcessor.assign_request_id`), unless `VLLM_DISABLE_REQUEST_ID_RANDOMIZATION` is set. Read in
vLLM 0.27.1, 0.31.0 and 0.32.0.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from json import loads
from pathlib import Path
from typing import Literal, cast

import aiohttp

from lightning.errors import PolicyServerError
from lightning.memory_budget import bounded
from lightning.policy_server.owner_secret import HEADER
from lightning.policy_server.protocol import Usage
from lightning.policy_server.vllm_arguments import check_settings, model_facts

logger = logging.getLogger(__name__)

CONTROL_SECONDS = 120.0
"""Most seconds of a control call; a pause waits for the step that is being computed."""
LOAD_SECONDS = 1800.0
"""Most seconds of loading weights, of any size."""
HEALTH_SECONDS = 5.0
LONGEST_REPLY = 16 << 20
"""Most bytes of an answer."""
MISSING_ROUTES = (
    "the vLLM at {url} has no RL routes; start it with VLLM_SERVER_DEV_MODE=1 and "
    "`--worker-extension-cls lightning.policy_server.worker.WorkerExtension`, where lightning is installed"
)


class NoRoutesError(PolicyServerError):
    """The server that answers has no routes for new weights."""


class NoAnswerError(PolicyServerError):
    """An answer did not come in time."""


class NotOursError(PolicyServerError):
    """The vLLM takes no weights from this trainer: another trainer has attached to it, or it was restarted since we
    attached."""


class VLLMControl:
    """A client of one vLLM's control routes. It keeps no connection: control calls are rare, and event loops come and go.

    `claimed_as` is the claim that this trainer left in the vLLM; calls that change the weights are refused if the vLLM has
    another claim. `secret` opens the control routes of a vLLM that has one (`owner_secret`).
    """

    def __init__(self, url: str, secret: str = "") -> None:
        self.url, self.claimed_as = url, ""
        self._headers = {HEADER: secret} if secret else {}

    async def health(self) -> Literal["ok", "dead", "refused", "silent"]:
        """Return the server's state. `dead`: the API answers without its engine; `refused`: nobody listens; `silent`: no answer
        in time."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self.url}/health") as reply:
                return "ok" if reply.status == 200 else "dead"
        except aiohttp.ClientConnectorError:
            return "refused"
        except (aiohttp.ClientError, TimeoutError):
            return "silent"

    async def check_settings(self, *extensions: str, updates: bool) -> None:
        """Raise `PolicyServerError` if the vLLM's own settings make its records wrong (`vllm_arguments.check_settings`)."""
        try:
            info = await self.call("GET", "/server_info", params={"config_format": "json"})
        except NoRoutesError:
            raise
        except PolicyServerError as error:
            logger.warning("the settings with which %s was started could not be checked: %s", self.url, error)
            return
        if not isinstance(info.get("vllm_config"), dict):
            logger.warning(
                "%s does not tell its settings, which could not be checked therefore: is it a vLLM as new as 0.31?",
                self.url,
            )
        check_settings(info, self.url, extensions, updates=updates)

    async def facts(self) -> Mapping[str, object]:
        """Return what the vLLM says of its model (`vllm_arguments.model_facts`)."""
        return model_facts(await self.call("GET", "/server_info", params={"config_format": "json"}))

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return bool((await self.call("GET", "/is_paused")).get("is_paused"))

    async def pause(self) -> None:
        """Freeze every request where it is; return when the engine stands still."""
        await self.call("POST", "/pause", params={"mode": "keep"})

    async def resume(self) -> None:
        """Let frozen requests go on; their tokens so far are computed again with the present weights."""
        await self.call("POST", "/resume")

    async def sleep(self) -> None:
        """Wait for requests in flight, hold back new ones, move the weights to the CPU's memory and drop the KV cache.

        This is level 1 of vLLM's sleep mode, which needs a start with `--enable-sleep-mode`.
        """
        await self.call("POST", "/sleep", params={"level": "1", "mode": "wait"}, seconds=LOAD_SECONDS)

    async def wake_up(self) -> None:
        """Bring weights and KV cache back onto the GPU, and let requests go on."""
        await self.call("POST", "/wake_up", seconds=LOAD_SECONDS)

    async def drop_prefix_cache(self) -> None:
        """Drop all cached keys and values, also those of frozen requests."""
        answer = await self.call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if answer.get("success") is False:
            raise PolicyServerError(f"{self.url} could not drop its prefix cache: blocks are still held")

    async def attach(self) -> int | None:
        """Have the extension watch requests from now on. Return the version of the weights, None when unknown."""
        versions = {answer.get("version") for answer in await self.rpc("lightning_attach")}
        version = versions.pop()
        return version if isinstance(version, int) and not versions else None

    async def usage(self) -> Usage | None:
        """Return what requests have needed since the first attach; None if the extension does not count."""
        answer = (await self.rpc("lightning_attach"))[0]  # all workers of an engine count the same requests
        counts = [answer.get(name) for name in Usage._fields]
        return Usage(*counts) if all(isinstance(count, int) for count in counts) else None  # type: ignore[arg-type]

    async def claimed(self) -> str:
        """Return the claim that was left last; "" in a vLLM that was started since, or whose workers disagree."""
        claims = {str(answer.get("claim")) for answer in await self.rpc("lightning_attach")}
        return claims.pop() if len(claims) == 1 else ""

    async def check_ours(self) -> None:
        """Raise `NotOursError` if this trainer left a claim that the vLLM does not have any more."""
        if self.claimed_as and (found := await self.claimed()) != self.claimed_as:
            raise self._not_ours(found)

    def _not_ours(self, owner: str) -> NotOursError:
        """Return the error for a vLLM whose claim is `owner`, not this trainer's; "" means that nobody has claimed it."""
        if not owner:
            return NotOursError(
                f"the vLLM at {self.url} is not this trainer's any more: it was started again since, or another trainer has "
                "taken it over and ended"
            )
        return NotOursError(
            f"another trainer has attached to the vLLM at {self.url} (its claim is {owner}), which takes weights from that one "
            "alone now: give each trainer a vLLM of its own (policy_server.attach), and resume this run"
        )

    async def set_version(self, version: int) -> None:
        """Declare the version of the loaded weights. Raises `NotOursError`."""
        await self.rpc("lightning_set_version", self.claimed_as, str(version))

    async def in_flight(self) -> dict[str, int]:
        """Return the response tokens sampled so far, by `client_key`. Call it while paused."""
        counts: dict[str, int] = {}
        for answer in await self.rpc("lightning_in_flight"):  # one answer per worker; they agree
            found = cast("dict[str, int]", self.part_of(answer, "counts", dict))
            for key, tokens in client_counts(found, randomized=bool(self.part_of(answer, "randomized"))).items():
                counts[key] = max(tokens, counts.get(key, 0))
        return counts

    async def load(self, files: Sequence[Path]) -> None:
        """Load safetensors files in place, as one checkpoint. Call it while paused. Raises `NotOursError`."""
        paths = (str(file.resolve()) for file in files)
        await self.rpc("lightning_load", self.claimed_as, *paths, seconds=LOAD_SECONDS)

    async def check_one_engine(self) -> None:
        """Raise `PolicyServerError` if the vLLM is data parallel: all its engines obey a call, but only the first answers."""
        workers, of_one = await self.world_size(), await self.world_size(replicas=False)
        if workers != of_one:
            raise PolicyServerError(
                f"the vLLM at {self.url} has {workers // of_one} data-parallel engines, of which one alone tells whether it "
                "has taken new weights and how far its requests were: start it without --data-parallel-size "
                "(policy_server.args, where it is ours), and give it more GPUs by --tensor-parallel-size"
            )

    async def world_size(self, *, replicas: bool = True) -> int:
        """Return the number of workers over all parallel dimensions; without `replicas` those of one engine."""
        params = {"include_dp": "true" if replicas else "false"}
        size = (await self.call("GET", "/get_world_size", params=params)).get("world_size")
        if not isinstance(size, int):
            raise PolicyServerError(f"{self.url}/get_world_size tells no size; is it a vLLM as new as 0.31?")
        return size

    async def served_logprobs(self, model: str, given: Sequence[int], seconds: float = CONTROL_SECONDS) -> list[float]:
        """Return the vLLM's logprobs of the tokens `given`, except the first, at temperature 1; shape (T - 1,).

        They are requested as a completion with prompt logprobs, for which vLLM computes the whole prompt anew, without prefix
        cache.
        """
        ids = list(given)
        if len(ids) < 2:
            return []
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await self.call("POST", "/v1/completions", json=body, seconds=seconds)
        try:
            rows = answer["choices"][0]["prompt_logprobs"]  # type: ignore[index]
            return [float(row[str(token)]["logprob"]) for token, row in zip(ids[1:], rows[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PolicyServerError(f"{self.url} answered the probe without its logprobs ({error!r})") from error

    def part_of(self, answer: Mapping[str, object], name: str, kind: type = object) -> object:
        """Return the part `name` of a worker's answer. Raises `PolicyServerError` if it is missing or not of this kind."""
        if not isinstance(found := answer.get(name, self), kind) or found is self:
            raise PolicyServerError(
                f"vLLM's worker at {self.url} answered {answer!r:.200}, without {name}: it has another release of lightning, "
                "or its answers are late by one since a call failed there; start it again with this release"
            )
        return found

    async def rpc(self, method: str, *args: str, seconds: float = CONTROL_SECONDS) -> list[Mapping[str, object]]:
        """Call a method of the extension on every worker. Return at least one answer, none of them an error."""
        body = {"method": method, "args": list(args)}
        answers = (await self.call("POST", "/collective_rpc", json=body, seconds=seconds)).get("results")
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, dict) for answer in answers):
            raise PolicyServerError(MISSING_ROUTES.format(url=self.url))
        for answer in answers:
            if "owner" in answer:
                raise self._not_ours(str(answer["owner"]))
            if "error" in answer:
                raise PolicyServerError(f"vLLM's worker at {self.url}, {method}: {answer['error']}")
        return answers

    async def call(
        self,
        verb: str,
        route: str,
        *,
        json: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
        seconds: float = CONTROL_SECONDS,
    ) -> Mapping[str, object]:
        """Send one request. Return the JSON object of its answer, or an empty mapping."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session,
                session.request(
                    verb, self.url + route, json=json, params=params, headers=self._headers, allow_redirects=False
                ) as reply,
            ):
                if reply.status == 404 and not route.startswith("/v1"):
                    raise NoRoutesError(MISSING_ROUTES.format(url=self.url))
                said = await bounded(reply.content.iter_any(), LONGEST_REPLY)
                if said is None:
                    raise PolicyServerError(
                        f"{verb} {self.url}{route} was answered with more than {LONGEST_REPLY} bytes"
                    )
                if reply.status != 200:
                    text = " ".join(said.decode("utf-8", "replace").split())
                    raise PolicyServerError(f"{verb} {self.url}{route} was answered {reply.status}: {text[:400]}")
                answer = loads(said) if said else {}
        except TimeoutError as error:
            raise NoAnswerError(f"{verb} {self.url}{route} was not answered in {seconds:.0f} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PolicyServerError(f"{verb} {self.url}{route} failed: {error or type(error).__name__}") from error
        return answer if isinstance(answer, dict) else {}


_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_CHAT = re.compile(r"(?:(?P<choice>\d+)_)?chatcmpl-(?P<id>.+)", re.DOTALL)
_COMPLETION = re.compile(r"(?:(?P<choice>\d+)_)?cmpl-(?P<id>.+)-(?P<prompt>\d+)", re.DOTALL)


def client_key(engine_id: str, *, randomized: bool = True) -> str:
    """Return the key in `Update.in_flight` for the engine's request id: `{id}`, or `{choice}_{id}` with several choices.

    A completions call with several prompts is several requests: with n = 1 the number of the prompt is the number of the choice
    (the first prompt's key stays the bare id); with n > 1 the later prompts keep `-{prompt}` behind the id, because the engine
    no longer knows n.
    """
    name = _SUFFIX.sub("", engine_id) if randomized else engine_id
    if match := _CHAT.fullmatch(name):
        return _key(match["choice"], match["id"])
    if match := _COMPLETION.fullmatch(name):
        choice, prompt = match["choice"], match["prompt"]
        if prompt == "0":
            return _key(choice, match["id"])
        return _key(prompt, match["id"]) if choice is None else _key(choice, f"{match['id']}-{prompt}")
    return name


def client_counts(engine_counts: Mapping[str, int], *, randomized: bool = True) -> dict[str, int]:
    """Return the counts by `client_key`. If two tries have the same id, the larger count is taken."""
    counts: dict[str, int] = {}
    for engine_id, tokens in engine_counts.items():
        key = client_key(engine_id, randomized=randomized)
        counts[key] = max(tokens, counts.get(key, 0))
    return counts


def _key(choice: str | None, request_id: str) -> str:
    return request_id if choice is None else f"{choice}_{request_id}"

"""A vLLM that somebody else has started says how, and is refused where its records would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from lightning.config import Config
from lightning.config.sections import PolicyServerConfig
from lightning.errors import PolicyServerError
from lightning.policy_server.vllm_server import make_policy_server
from lightning_attach.attached import AttachedVLLM


def attach(fake: Any, model: Path) -> AttachedVLLM:
    return AttachedVLLM(model, PolicyServerConfig(attach=fake.url))


def change(info: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        info = info[section]
    info[name] = value


@pytest.mark.parametrize(
    ("path", "value", "cure"),
    [
        ("vllm_config.model_config.logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("vllm_config.model_config.generation_config", "auto", "--generation-config vllm"),
        ("vllm_config.model_config.override_generation_config", {"top_k": 1}, "no --override-generation-config"),
        ("vllm_config.parallel_config.worker_extension_cls", "", "--worker-extension-cls lightning.policy_server.worker"),
        ("vllm_config.parallel_config.distributed_executor_backend", "ray", "no --distributed-executor-backend ray"),
    ],
)  # fmt: skip
async def test_what_makes_records_wrong_is_refused_with_the_flag(
    fake: Any, model: Path, path: str, value: object, cure: str
) -> None:
    change(fake.info, path, value)
    with pytest.raises(PolicyServerError, match=rf"cannot be trained on: .*{cure}"):
        await attach(fake, model).start()
    assert "claim" not in fake.calls, "it stays whose it was"


@pytest.mark.parametrize(
    ("path", "value", "cure"),
    [
        ("vllm_env.VLLM_USE_V2_MODEL_RUNNER", True, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("vllm_env.VLLM_USE_V2_MODEL_RUNNER", None, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("vllm_config.scheduler_config.async_scheduling", True, "--no-async-scheduling"),
    ],
)
async def test_what_counts_rest_on_is_judged_on_cuda_alone(
    fake: Any, model: Path, path: str, value: object, cure: str
) -> None:
    change(fake.info, "vllm_env.VLLM_USE_V2_MODEL_RUNNER", False)
    change(fake.info, path, value)
    server = attach(fake, model)
    await server.start()
    await server.close()
    change(fake.info, "vllm_config.device_config.device", "cuda")
    with pytest.raises(PolicyServerError, match=cure):
        await attach(fake, model).start()


async def test_all_that_is_wrong_is_said_at_once(fake: Any, model: Path) -> None:
    change(fake.info, "vllm_config.model_config.logprobs_mode", "raw_logprobs")
    change(fake.info, "vllm_config.model_config.generation_config", "auto")
    with pytest.raises(PolicyServerError, match=r"--logprobs-mode.*; .*--generation-config vllm\. Start it again"):
        await attach(fake, model).start()


async def test_one_whose_weights_never_change_may_count_as_it_likes(fake: Any, model: Path) -> None:
    change(fake.info, "vllm_config.parallel_config.distributed_executor_backend", "ray")
    server = make_policy_server(
        model, Config(policy_server=PolicyServerConfig(attach=fake.url)), log=Path("unused"), claims=False
    )
    await server.start()
    await server.close()


async def test_a_missing_parser_is_a_warning(fake: Any, model: Path, warnings_of: Callable[[], list[str]]) -> None:
    fake.tool_parser = False
    server = attach(fake, model)
    await server.start()
    await server.close()
    (told,) = warnings_of()
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in told


async def test_one_that_does_not_say_is_taken_with_a_warning(
    fake: Any, model: Path, warnings_of: Callable[[], list[str]]
) -> None:
    async def broken(request: web.Request) -> web.Response:
        return web.Response(status=500, text="it broke")

    fake.answers["/server_info"] = broken
    server = attach(fake, model)
    await server.start()
    await server.close()
    (told,) = warnings_of()
    assert "could not be checked" in told
    assert "it broke" in told


@pytest.mark.parametrize("info", [{}, {"vllm_config": "model='m', logprobs_mode='raw_logprobs'"}])
async def test_one_that_tells_no_settings_is_taken_with_a_warning(
    fake: Any, model: Path, warnings_of: Callable[[], list[str]], info: dict[str, Any]
) -> None:
    fake.info = info
    server = attach(fake, model)
    await server.start()
    await server.close()
    (told,) = warnings_of()
    assert "does not tell its settings" in told

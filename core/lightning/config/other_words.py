"""Words of TRL, verl and agent-lightning, each with its meaning and the word for it here.

The invariant: each answer is Python that names a setting, an argument or a function that exists. It is asked before similar
spellings are, which mislead: `beta` is no `betas`.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple


class Word(NamedTuple):
    """`whose` word it is, what it means, and the `answer`: an assignment to a setting, or a call."""

    whose: str
    meaning: str
    answer: str

    @property
    def said(self) -> str:
        """The answer, and where it is written."""
        if self.answer.startswith("LightningRL(") and "=" in self.answer:
            given = self.answer[len("LightningRL(") : -1].replace(", ", ",").replace('"', "")
            return f"`{self.answer}`, or `--algorithm grpo:{given}`"
        key, equals, value = self.answer.partition(" = ")
        if not equals:
            return f"`{self.answer}`"
        return f"`--set {shlex.quote(f'{key}={value.strip(chr(34))}')}`, or `config={{{key!r}: {value}}}`"


def _of(whose: str, *rows: tuple[str, str, str]) -> Iterator[tuple[str, Word]]:
    """Yield the words of rows: words with spaces between, their meaning, the answer."""
    for words, meaning, answer in rows:
        for word in words.split():
            yield word, Word(whose, meaning, answer)


_STEPS = "the number of updates of a run"
_STEP_SIZE = "the size of a step, here in tasks: each is run group_size times"
_MICRO = "how much is computed at once, here in tokens"
_KL = "the weight of the KL term"
_SAMPLING = "how the model samples: the agent's own arguments of a call decide, unless a run overrides them"
_LENGTH = "the longest answer of a call: the agent's own max_tokens decides, unless a run overrides it"
_REWARD = "the reward: the agent returns it (a number, or a mapping of named parts)"
_FIT = "Trainer.fit(agent, train=tasks)"

WORDS: Final[Mapping[str, Word]] = dict(
    (
        *_of(
            "TRL",
            ("beta", _KL, "LightningRL(kl_coefficient=0.04)"),
            ("num_generations", "the number of rollouts of a task in a step", "LightningRL(group_size=8)"),
            ("per_device_train_batch_size generation_batch_size", _STEP_SIZE, "trainer.tasks_per_step = 16"),
            ("gradient_accumulation_steps", _MICRO, "engine.tokens_per_microbatch = 8192"),
            ("max_completion_length", _LENGTH, "gateway.override_sampling.max_tokens = 512"),
            ("max_prompt_length vllm_max_model_length", "the longest context", "policy_server.max_model_len = 4096"),
            ("num_iterations", "the number of passes over the rollouts of a step", "engine.epochs = 1"),
            ("steps_per_generation", "the number of updates in a pass over a step", "engine.minibatches = 1"),
            ("epsilon", "the clipping of ratios below and above 1", "LightningRL(clip_low=0.2, clip_high=0.2)"),
            ("epsilon_high", "the clipping of ratios above 1", "LightningRL(clip_high=0.28)"),
            ("loss_type", "how tokens are averaged", 'LightningRL(normalization="token-mean")'),
            ("scale_rewards", "dividing advantages by a deviation", 'LightningRL(scaling="none")'),
            ("importance_sampling_level", "a ratio for each token or each sequence", 'LightningRL(ratio="sequence")'),
            ("vllm_importance_sampling_correction", "the correction of the sampler", 'LightningRL(correction="tis")'),
            ("learning_rate", "the learning rate", "engine.lr = 1e-6"),
            ("max_steps num_train_epochs", _STEPS, "trainer.steps = 100"),
            ("reward_funcs reward_weights", _REWARD, _FIT),
            ("train_dataset formatting_func data_collator", "the tasks that are trained on", _FIT),
            ("eval_dataset", "the held-out tasks", "Trainer.fit(agent, train=tasks, val=held_out)"),
            ("eval_steps eval_strategy", "how often held-out tasks are evaluated", "trainer.eval_every = 10"),
            ("save_steps save_strategy", "how often a checkpoint is written", "trainer.checkpoint_every = 1"),
            ("save_total_limit", "the number of checkpoints kept", "trainer.keep_checkpoints = 2"),
            ("output_dir", "the folder of the run", 'Trainer(model, out="runs/mine")'),
            ("resume_from_checkpoint", "going on with a run", 'Trainer(model, out="runs/mine", resume=True)'),
            ("report_to", "who receives the metrics", 'trainer.trackers = ["jsonl"]'),
            ("warmup_ratio", "the warm-up of the learning rate, here in steps", "engine.warmup_steps = 10"),
            ("lr_scheduler_type", "how the learning rate falls", 'engine.lr_schedule = "cosine"'),
            ("adam_beta1 adam_beta2", "AdamW's betas", "engine.betas = [0.9, 0.95]"),
            ("adam_epsilon", "AdamW's epsilon", "engine.eps = 1e-8"),
            ("bf16 fp16 torch_dtype", "the type that is computed in", 'engine.dtype = "bfloat16"'),
            ("peft_config lora_config use_peft", "training adapters", "engine.lora = {}"),
            ("lora_r lora_rank", "the rank of adapters", "engine.lora.rank = 16"),
            ("lora_alpha", "the scale of adapters", "engine.lora.alpha = 32"),
            ("lora_target_modules", "where adapters are", 'engine.lora.target_modules = "all-linear"'),
            ("ref_model", "the reference, here the model that training began with", "LightningRL(kl_coefficient=0.04)"),
            ("processing_class tokenizer", "the tokenizer: the one in the model's folder", "Trainer(model)"),
            ("use_vllm vllm_mode vllm_device", "sampling with vLLM, as always here", 'policy_server.device = "auto"'),
            ("vllm_server_base_url vllm_server_host", "a vLLM that runs", 'policy_server.attach = "http://host:8000"'),
            (
                "vllm_gpu_memory_utilization",
                "vLLM's share of the GPU",
                "policy_server.gpu_memory_utilization = 0.4",
            ),
            (
                "args GRPOConfig GRPOTrainer",
                "the settings of a training",
                'Trainer(model, LightningRL("grpo"), lr=1e-6)',
            ),
            ("DPOConfig DPOTrainer", "training on pairs", 'Trainer(model, "dpo")'),
            ("SFTConfig SFTTrainer", "training on demonstrations", 'Trainer(model, "sft")'),
            ("RLOOConfig RLOOTrainer", "the algorithm RLOO", 'Trainer(model, LightningRL("rloo"))'),
        ),
        *_of(
            "TRL and verl",
            ("temperature top_p top_k min_p", _SAMPLING, "gateway.override_sampling.temperature = 1.0"),
            ("repetition_penalty", _SAMPLING, "gateway.override_sampling.repetition_penalty = 1.0"),
        ),
        *_of(
            "verl",
            ("kl_coef kl_loss_coef use_kl_loss use_kl_in_reward kl_ctrl", _KL, "LightningRL(kl_coefficient=0.001)"),
            ("kl_loss_type kl_penalty", "the estimator of the KL term", 'LightningRL(kl_estimator="k3")'),
            ("rollout.n", "the number of rollouts of a task in a step", "LightningRL(group_size=8)"),
            ("clip_ratio", "the clipping of ratios below and above 1", "LightningRL(clip_low=0.2, clip_high=0.2)"),
            ("clip_ratio_low", "the clipping of ratios below 1", "LightningRL(clip_low=0.2)"),
            ("clip_ratio_high", "the clipping of ratios above 1", "LightningRL(clip_high=0.28)"),
            ("adv_estimator", "the algorithm", 'LightningRL("rloo")'),
            ("loss_mode", "the loss of a token", 'LightningRL("gspo", estimator="rloo")'),
            ("norm_adv_by_std_in_grpo", "dividing advantages by a deviation", 'LightningRL(scaling="none")'),
            ("loss_agg_mode", "how tokens are averaged", 'LightningRL(normalization="token-mean")'),
            ("entropy_coeff", "the weight of the entropy bonus", "LightningRL(entropy_coefficient=0.001)"),
            ("rollout_is tis_imp_ratio_cap", "the correction of the sampler", 'LightningRL(correction="tis")'),
            ("filter_groups", "sampling more where a group teaches nothing", "LightningRL(dynamic_sampling=True)"),
            (
                "overlong_buffer_cfg",
                "the penalty of long answers",
                "LightningRL(overlong_tokens=4096, overlong_buffer=512)",
            ),
            ("train_batch_size", _STEP_SIZE, "trainer.tasks_per_step = 16"),
            ("ppo_mini_batch_size", "the number of updates in a pass over a step", "engine.minibatches = 1"),
            ("ppo_epochs", "the number of passes over the rollouts of a step", "engine.epochs = 1"),
            (
                "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
                _MICRO,
                "engine.tokens_per_microbatch = 8192",
            ),
            ("max_response_length", _LENGTH, "gateway.override_sampling.max_tokens = 512"),
            ("total_epochs total_training_steps", _STEPS, "trainer.steps = 100"),
            ("test_freq", "how often held-out tasks are evaluated", "trainer.eval_every = 10"),
            ("save_freq", "how often a checkpoint is written", "trainer.checkpoint_every = 1"),
            ("default_local_dir experiment_name", "the folder of the run", 'Trainer(model, out="runs/mine")'),
            ("train_files", "the tasks that are trained on", _FIT),
            ("val_files", "the held-out tasks", "Trainer.fit(agent, train=tasks, val=held_out)"),
            ("reward_model custom_reward_function", _REWARD, _FIT),
            (
                "tensor_model_parallel_size",
                "the number of GPUs of vLLM",
                'policy_server.args = ["--tensor-parallel-size", "2"]',
            ),
            (
                "actor_rollout_ref actor_rollout actor",
                "the settings of a training",
                'Trainer(model, LightningRL("grpo"))',
            ),
        ),
        *_of(
            "agent-lightning",
            ("n_runners n_workers", "the number of agents that run at once", "runner.concurrency = 32"),
            ("LitAgent rollout_fn training_rollout", "the agent: a function of (task, llm)", _FIT),
            ("train_data", "the tasks that are trained on", _FIT),
            ("val_dataset val_data", "the held-out tasks", "Trainer.fit(agent, train=tasks, val=held_out)"),
            ("emit_reward", "a reward of a single call", "lightning.reward(1.0)"),
        ),
    )
)


def answer(name: str) -> str:
    """Say what another library's word is here: of a dotted name first the whole, then ever shorter ends, then its beginning.
    "" for a word that is not known."""
    parts = name.split(".")
    asked = [".".join(parts[place:]) for place in range(len(parts))] + parts[:1]
    word = next((each for each in asked if each in WORDS), None)
    if word is None:
        return ""
    return f"`{word}` is {WORDS[word].whose}'s word for {WORDS[word].meaning}. Here: {WORDS[word].said}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the most similar known word, or "" if none is similar. The last part of a dotted key
    may match alone."""
    known = list(known)
    near = difflib.get_close_matches(word, known, 1, 0.75)
    if not near:
        by_last = {name.rpartition(".")[2]: name for name in known}
        near = [by_last[last] for last in difflib.get_close_matches(word.rpartition(".")[2], by_last, 1, 0.8)]
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown_argument(what: str, name: str, known: Iterable[str], takes: str = "") -> str:
    """Return the message for an argument that `what` does not take: whose word it is, or else the most similar name, and the
    arguments that `what` takes."""
    if said := answer(name):
        return f"{what} has no argument {name!r}: {said}"
    known = list(known)
    return f"{what} has no argument {name!r}{did_you_mean(name, known) or '.'} It takes: {takes or ', '.join(known)}"

"""The plan of a deployment: what `lightning train` would run, cut into processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.errors import ConfigError
from lightning_deploy.deploy_plan import Options, make_plan, sweep_plans
from lightning_deploy.render import CLUSTER, Cloud, render_sweep

from tests.plugins.deploy.conftest import TRAIN


def test_a_plan_keeps_the_arguments_and_cuts_off_the_agent(project: Path) -> None:
    plan = make_plan(TRAIN, Options(clients=4), project)
    trainer, client = plan.trainer_command(CLUSTER), plan.client_command(CLUSTER)
    assert trainer[:2] == ["train-or-resume", "/runs/my-agent"]
    assert "my_agent:solve" not in trainer
    assert trainer[2 : 2 + len(plan.train)] == list(plan.train)
    assert sorted(plan.train) == sorted(TRAIN[1:])
    assert client[-3:] == ["--set", "runner.timeout=60", "my_agent:solve"]
    assert plan.concurrency == 8  # 32 agents over 4 clients
    assert plan.secrets == ("SEARCH_KEY",)
    assert plan.data == (Path("data/train.jsonl"),)
    assert plan.machine.gpus == 1
    assert all(use.fits for use in plan.machine.uses)


def test_the_tag_changes_with_the_agent(project: Path) -> None:
    first = make_plan(TRAIN, Options(), project).tag
    (project / "helpers" / "shots.txt").write_text("other\n")
    second = make_plan(TRAIN, Options(), project).tag
    (project / "data" / "train.jsonl").write_text('{"input": "3 + 3?", "expected": "6"}\n')
    assert len({first, second, make_plan(TRAIN, Options(), project).tag}) == 3
    assert make_plan(TRAIN, Options(tag="mine"), project).tag == "mine"


def test_the_trainer_gets_what_its_settings_read(project: Path) -> None:
    critic = ["optimizer_model.base_url=https://api.example.org/v1", "optimizer_model.model=critic"]
    settings = [*critic, "trainer.alerts=['webhook:ALERTS_URL']"]
    given = [part for text in settings for part in ("--set", text)]
    plan = make_plan([*TRAIN, *given], Options(trainer_secrets=("OTHER",)), project)
    assert plan.trainer_secrets == ("ALERTS_URL", "OPENAI_API_KEY", "OTHER")
    assert plan.secrets == ("SEARCH_KEY",)


def test_tokens_are_of_the_trainers_project(project: Path) -> None:
    plan = make_plan([*TRAIN, "--set", "trainer.project=team"], Options(), project)
    assert plan.token_command(CLUSTER)[-1] == "team"


def test_a_name_that_says_nothing_has_the_folders_before_it(project: Path) -> None:
    (project / "agent.py").write_text((project / "my_agent.py").read_text())
    assert make_plan(["agent:solve", *TRAIN[1:]], Options(), project).name.endswith("-agent")


def test_gpus_are_those_that_the_engine_uses(project: Path) -> None:
    plan = make_plan([*TRAIN, "--engine", "verl", "--set", "engine.verl.world_size=4"], Options(), project)
    assert plan.machine.gpus == 4
    assert "verl" in plan.extras


def policies(*overrides: str) -> list[str]:
    given = ['policies.writer.agents=["write"]', 'policies.judge.agents=["judge"]', *overrides]
    return [*TRAIN, *(part for each in given for part in ("--set", each))]


def test_policies_need_the_memory_of_all_their_adapters_and_a_vllm_for_each_model(project: Path) -> None:
    one, two = (make_plan(arguments, Options(), project) for arguments in (TRAIN, policies()))
    assert (two.machine.gpus, two.machine.notes) == (1, ())
    assert sum(use.used for use in two.machine.uses) > sum(use.used for use in one.machine.uses)
    assert two.train[-4:] == tuple(policies()[-4:])
    (project / "judge").mkdir()
    (project / "judge" / "config.json").write_text("{}")
    apart = make_plan(policies("policies.judge.base=judge", "policies.judge.train=false"), Options(), project)
    assert apart.machine.gpus == 3, "one trains, and each model has a vLLM"
    assert "the policies have 2 models with vLLMs of their own" in apart.machine.notes[0]
    assert apart.machine.uses, "the writer's model is known, whatever the judge's is"
    assert Path("judge") in apart.data


def test_models_of_policies_are_refused_as_soon_as_one_of_them_does_not_fit_alone(project: Path) -> None:
    place = TRAIN.index("engine.lora.rank=16")
    given = [*TRAIN[: place - 1], *TRAIN[place + 1 :]]
    more = policies()[len(TRAIN) :]
    large = Options(gpu="h200")
    one, two = (make_plan(arguments, large, project).machine for arguments in (given, [*given, *more]))
    assert (one.notes, len(two.notes), two.gpus) == ((), 1, 3)
    assert two.memory - 32 >= 2 * (one.memory - 32) - 1, "each model's weights pass through it"
    assert two.disk - 60 >= 2 * (one.disk - 60) - 1, "each model has its checkpoints"
    with pytest.raises(ConfigError, match=r"Qwen3-4B needs 80 GB .* h100 for training.* 1 x h200 \(--gpu\)"):
        make_plan([*given, *more], Options(), project)
    with pytest.raises(ConfigError, match=r"Qwen3-8B needs \d+ GB of each of 1 h200 for training, which has 141"):
        make_plan([*given, *more, "--set", "policies.judge.base=Qwen/Qwen3-8B"], large, project)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--engine", "verl"], "need the engine torch and vLLMs on the trainer's machine"),
        (["--set", "policy_server.replicas=4"], "1 GPUs for training and 8 for vLLMs"),
        (["--set", "policies.judge.base=../elsewhere"], "policies.judge.base .*elsewhere"),
    ],
)
def test_policies_that_a_deployment_cannot_keep_are_refused(project: Path, more: list[str], said: str) -> None:
    (project.parent / "elsewhere").mkdir(exist_ok=True)
    own = policies("policies.judge.base=Qwen/Qwen3-0.6B", "policies.judge.train=false")
    with pytest.raises(ConfigError, match=said):
        make_plan([*own, *more], Options(), project)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--out", "runs/x"], "--out: a deployment sets that"),
        (["--runner", "remote"], "--runner: a deployment sets that"),
        (["--sets", "x=1"], "lightning train would say: No such option"),
        (["--set", "trainer.stepz=1"], "trainer.stepz"),
        (["--val", "/elsewhere/val.jsonl"], "--val /elsewhere/val.jsonl is no file here"),
        (["--from", "runs/x@3"], "the other run is not in the image"),
        (["--set", "runner.sandbox=bwrap"], "containers are the sandbox"),
        (["--set", "policy_server.attach=http://me:secretword@host"], "what follows --set seems to hold a secret"),
        (["--engine", "verl", "--set", "engine.verl.nodes=2"], "for one machine of up to 8 GPUs"),
        (["--algorithm", "grpo\nrm -rf"], "control character"),
    ],
)
def test_arguments_that_a_deployment_cannot_keep_are_refused(project: Path, more: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_plan([*TRAIN, *more], Options(), project)


def test_a_model_that_does_not_fit_is_refused_with_what_would(project: Path) -> None:
    place = TRAIN.index("engine.gradient_checkpointing=true")
    whole = [*TRAIN[: place - 1], *TRAIN[place + 1 :]]
    with pytest.raises(
        ConfigError, match=r"Qwen3-4B needs 102 GB of each of 1 h100 .* has 80: it would fit on 1 x h200"
    ):
        make_plan(whole, Options(), project)
    assert make_plan(whole, Options(gpu="h200"), project).machine.gpus == 1
    with pytest.raises(ConfigError, match=r"Qwen3-8B needs 258 GB .*: train adapters"):
        make_plan([*TRAIN[:2], "Qwen/Qwen3-8B", *TRAIN[3:7]], Options(), project)


def test_a_model_that_cannot_be_counted_is_a_note(project: Path) -> None:
    (project / "odd").mkdir()
    (project / "odd" / "config.json").write_text('{"model_type": "mamba"}')
    plan = make_plan([TRAIN[0], "--model", "odd", *TRAIN[3:]], Options(), project)
    assert plan.machine.uses == ()
    assert "mamba" in plan.machine.notes[0]
    assert Path("odd") in plan.data  # a folder becomes a layer of the trainer's image


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(image="Not A Name"), "no name of images"),
        (Options(secrets=("KEY=hunter2",)), "its value is never given here"),
        (Options(name="42"), "makes no name"),
        (Options(gpu="tpu"), "no GPU that deployments know"),
    ],
)
def test_bad_options_are_named(project: Path, options: Options, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_plan(TRAIN, options, project)


def test_a_missing_agent_and_missing_tasks_are_named(project: Path) -> None:
    with pytest.raises(ConfigError, match="name the agent"):
        make_plan(TRAIN[1:], Options(), project)
    with pytest.raises(ConfigError, match="give --tasks"):
        make_plan(TRAIN[:3], Options(), project)


def test_a_file_outside_of_the_project_is_refused(project: Path) -> None:
    outside = project.parent / "outside.jsonl"
    outside.write_text("{}")
    with pytest.raises(ConfigError, match=r"--tasks .*outside.jsonl: give a path below"):
        make_plan([*TRAIN[:3], "--tasks", str(outside)], Options(), project)


def test_a_program_needs_no_module(project: Path) -> None:
    plan = make_plan(["command:claude -p {task.input}", *TRAIN[1:]], Options(name="claude"), project)
    assert plan.sources.paths == ()
    assert plan.client_command(CLUSTER)[-1] == "command:claude -p {task.input}"


def test_a_spot_machine_needs_a_database_elsewhere() -> None:
    with pytest.raises(ConfigError, match="--spot needs --store"):
        Cloud(spot=True)
    with pytest.raises(ConfigError, match="has a password in it"):
        Cloud(spot=True, store="postgresql://me:pw@db/x")  # pragma: allowlist secret
    with pytest.raises(ConfigError, match="has a password in it"):
        Cloud(store="postgresql://db/x?user=me&password=pw")


def test_a_sweep_on_several_machines_needs_a_database(project: Path) -> None:
    with pytest.raises(ConfigError, match="a sweep on several machines needs --store"):
        render_sweep([make_plan(TRAIN, Options(), project)], "lr", Path("deploy"), lambda *_: "", Cloud())


def test_runs_of_a_sweep_that_would_be_one_job_are_refused(project: Path) -> None:
    (project / "two.toml").write_text(
        f'train = {list(TRAIN)!r}\n[variants]\n"a.b" = "--algorithm grpo"\n"a_b" = "--algorithm ppo"\n'
    )
    with pytest.raises(ConfigError, match=r"two runs of .*two.toml would be jobs called 'a-b-seed0'"):
        sweep_plans(project / "two.toml", Options(), project)

"""`lightning.command`: programs as agents, through the runners that agents have."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import lightning
import pytest
from lightning.cli.output import load_agent
from lightning.config.plugin_settings import RunnerConfig
from lightning.errors import ConfigError, RunnerError
from lightning.instrument.providers import LOGINS
from lightning.runner.inline import InlineRunner
from lightning.runner.process import ProcessRunner
from lightning.runner.protocol import Agent, Runner
from lightning.testing import rollout
from lightning.types import LLM, Fault, Lease, Outcome, Rollout, Task
from lightning_command.running import MOST, CommandResult
from lightning_record.exchanges import read

NOWHERE = LLM("http://127.0.0.1:1/v1", "k-of-the-rollout", "policy")

ASKING = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
open("reward.json", "w").write(json.dumps({"right": float(answer == "4"), "length": len(answer)}))
print(answer)
sys.exit(answer != "4")
"""
"""A client without any package: it asks once, and writes the answer in three ways."""


def runs(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", script.replace("{", "{{").replace("}", "}}"), *arguments]


def sh(script: str) -> list[str]:
    return ["sh", "-c", script, "sh", "{task.input}"]


def run_once(agent: Agent, task: object = "x", runner: str = "inline", **settings: object) -> Outcome:
    async def main() -> Outcome:
        async with running(agent, runner, **settings) as started:
            return await started.run(lease_of(task), NOWHERE)

    return asyncio.run(main())


def lease_of(task: object) -> Lease:
    asked = task if isinstance(task, Task) else Task(task)  # type: ignore[arg-type]
    return Lease(Rollout("rollout", "run", asked, "group", attempt=1), "worker", 0.0)


@asynccontextmanager
async def running(agent: Agent, runner: str, **settings: object) -> AsyncIterator[Runner]:
    config = RunnerConfig(**{"concurrency": 4, "timeout": 60, **settings})  # type: ignore[arg-type]
    made = InlineRunner(agent, config) if runner == "inline" else ProcessRunner(agent, config)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def entries(folder: Path) -> int:
    return len(list(folder.iterdir()))


def grade(task: Task, result: CommandResult) -> dict[str, float]:
    answer = (result.folder / "answer.txt").read_text()
    return {"right": float(answer == task.expected), "printed": float(result.stdout == f"{answer}\n")}


@pytest.mark.parametrize(
    ("outcome", "rewards"),
    [
        ({}, {}),
        ({"reward_file": "reward.json"}, {"right": 1.0, "length": 1.0}),
        ({"grader": grade}, {"right": 1.0, "printed": 1.0}),
    ],
)
def test_a_program_that_asks_the_policy_is_a_rollout_under_its_own_name(outcome: dict, rewards: dict) -> None:
    agent = lightning.command(runs(ASKING, "{task.input}"), name="asker", **outcome)
    record = rollout(agent, Task("2 + 2?", expected="4"), ["4"])
    assert record.rollout.error == ""
    assert record.rollout.reward == (sum(rewards.values()) or 1.0)
    assert dict(record.rollout.rewards) == rewards
    (call,) = record.transitions
    assert call.caller.agent == "asker"


def test_exit_code_1_is_a_reward_of_0_and_any_other_is_none() -> None:
    record = rollout(lightning.command(runs(ASKING, "{task.input}")), "2 + 2?", ["5"])
    assert record.rollout.reward == 0.0
    for code, said in ((2, "exited with code 2: usage"), (137, "was ended by signal 9: usage")):
        end = f"exit {code}" if code < 128 else "kill -9 $$"
        outcome = run_once(lightning.command(sh(f"echo usage >&2; {end}")))
        assert (outcome.reward, outcome.fault) == (None, Fault.AGENT)
        assert said in outcome.error


def test_a_grader_sees_how_a_program_failed_and_may_score_it() -> None:
    agent = lightning.command(sh("echo no >&2; exit 7"), grader=lambda task, result: result.exit_code / 10)
    assert run_once(agent).reward == 0.7


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("true", "there is no reward in reward.txt: No such file or directory"),
        ("echo well > reward.txt", "it must be a number, or a JSON object of numbers"),
        ("echo '\"good\"' > reward.txt", "the agent's reward"),
        ("echo 1 > reward.txt; echo tired; exit 1", "exited with code 1: tired"),
        ("mkfifo reward.txt", "there is no reward in reward.txt: it is no regular file"),
        ("ln -s /dev/zero reward.txt", "there is no reward in reward.txt: it is no regular file"),
        ("printf '%070000d' 1 > reward.txt", "it is longer than 65536 bytes"),
        ("printf '%060000d' 0 | tr 0 '[' > reward.txt", "it is nested too deeply"),
    ],
)
def test_a_file_without_a_reward_is_a_fault(script: str, said: str) -> None:
    outcome = run_once(lightning.command(sh(script), reward_file="reward.txt"))
    assert outcome.fault is Fault.AGENT
    assert said in outcome.error


@pytest.mark.parametrize("name", ["reward.txt", "out/reward.txt"])
def test_a_reward_that_lay_among_the_files_is_no_rollout_s(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("1.0")
    agent = lightning.command(sh("true"), files=str(tmp_path), reward_file=name)
    outcome = run_once(agent)
    assert (outcome.reward, outcome.fault) == (None, Fault.AGENT)
    assert f"has a {name} already" in outcome.error


@pytest.mark.parametrize("name", ["/tmp/reward.txt", "../reward.txt"])
def test_a_reward_that_all_rollouts_would_share_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="outside of a rollout's folder"):
        lightning.command(sh("true"), reward_file=name)


def test_a_reward_file_that_is_the_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="is the rollout's folder itself: name a file below it"):
        lightning.command(sh("true"), reward_file=".")


def seen_by(task: Task, result: CommandResult) -> float:
    """A grader that keeps what it sees in the place of an error."""
    raise LookupError(result.stdout)


def test_the_environment_leads_to_the_policy_and_to_nothing_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOGINS:
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("CODEX_HOME", "/home/me/.codex")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    outcome = run_once(
        lightning.command(["env"], grader=seen_by, env={"MINE": "{task.id}/{llm.model}"}), Task("x", id="t1")
    )
    there = dict(line.split("=", 1) for line in outcome.error.splitlines() if "=" in line)
    assert there["OPENAI_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert there["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
    assert there["OPENAI_MODEL"] == there["ANTHROPIC_MODEL"] == "policy:env"
    assert there["MINE"] == "t1/policy:env"
    assert there["DO_NOT_TRACK"] == there["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
    assert (there["CREWAI_DISABLE_TELEMETRY"], there["CREWAI_TRACING_ENABLED"]) == ("true", "false")
    assert "127.0.0.1" in there["NO_PROXY"]
    assert there["HOME"] != os.environ["HOME"]
    assert not {*LOGINS, "CODEX_HOME"} & set(there)


@pytest.mark.parametrize("program", ["claude", "codex", "opencode"])
def test_known_programs_find_the_policy_where_they_look_for_it(program: str, tmp_path: Path) -> None:
    fake = tmp_path / program
    fake.write_text(
        "#!/bin/sh\nenv; cat $HOME/.codex/config.toml $HOME/.config/opencode/opencode.json 2>/dev/null\ntrue\n"
    )
    fake.chmod(0o755)
    said = run_once(lightning.command([str(fake)], grader=seen_by)).error
    expected = {
        "claude": ["ANTHROPIC_DEFAULT_HAIKU_MODEL=policy:claude.small", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1"],
        "codex": ['model = "policy:codex"', 'base_url = "http://127.0.0.1:1/v1"', 'env_key = "OPENAI_API_KEY"'],
        "opencode": [
            '"model": "lightning/policy:opencode"',
            '"baseURL": "http://127.0.0.1:1/v1"',
            '"share": "disabled"',
        ],
    }
    assert [text for text in expected[program] if text not in said] == []


def test_each_rollout_has_a_folder_of_its_own_with_the_files_that_it_is_to_have(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "code.py").write_text("1")
    agent = lightning.command(
        sh("test ! -e seen && cp code.py seen && cat"),
        files=str(tmp_path / "{task.metadata.repo}"),
        stdin="{task.input}\n",
        grader=lambda task, result: entries(result.folder) + float(result.stdout == "x\n") * 10,
    )
    task = Task("x", metadata={"repo": "repo"})
    assert [run_once(agent, task).reward for _ in range(2)] == [12.0, 12.0]
    assert entries(tmp_path / "repo") == 1
    lost = run_once(agent, Task("x", metadata={"repo": "elsewhere"}))
    assert "elsewhere, which is no folder" in lost.error


def test_binary_output_of_any_length_is_no_harm() -> None:
    script = f"import sys; w = sys.stdout.buffer.write; w(b'\\xff\\x00\\n' + b'a' * {3 * MOST} + b'end')"

    def length(task: Task, result: CommandResult) -> float:
        assert result.output.startswith(b"\xff\x00")
        assert result.stdout.startswith("\ufffd\0")
        assert result.stdout.endswith("end")
        return float(len(result.output))

    reward = run_once(lightning.command(runs(script), grader=length)).reward
    assert reward is not None
    assert 2 * MOST <= reward < 2 * MOST + 100


@pytest.mark.parametrize("runner", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_a_program_that_never_ends_is_timed_out_with_all_that_it_has_started(runner: str) -> None:
    agent = lightning.command(sh("sleep 600 & setsid sleep 600 & exec sleep 600"))
    outcome = run_once(agent, runner=runner, timeout=1.5)
    assert outcome.fault is Fault.TIMEOUT  # the fixture sees that nothing is left


def test_what_a_program_leaves_behind_ends_before_it_is_graded() -> None:
    fork = "if os.fork(): os._exit(0)\n"
    daemon = f"import os, time\n{fork}os.setsid()\n{fork}time.sleep(2)\nopen('late', 'w')"
    agent = lightning.command(runs(daemon), grader=lambda task, result: float(entries(result.folder)))
    outcome = run_once(agent)
    assert outcome.reward == 0.0
    assert outcome.seconds < 2


def test_what_is_not_installed_is_named_before_the_first_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"the program 'no-such-cli' is in no folder of PATH: install it"):
        lightning.command("no-such-cli -p {task.input}")
    program = tmp_path / "there"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    agent = lightning.command([str(program)])
    program.unlink()
    with pytest.raises(
        RunnerError, match=r"loading the agent failed in a new process: the program '.*there' is not there"
    ):
        run_once(agent, runner="process")


def test_a_program_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    outcome = run_once(lightning.command([str(broken)]))
    assert "broken cannot be started: No such file or directory" in outcome.error


def test_the_command_line_names_a_program_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graders_of_programs.py").write_text("def grade(task, result):\n    return float(result.stdout)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    agent = load_agent("command:--grader graders_of_programs:grade --env N={task.metadata.n} sh -c 'echo $N'")
    assert run_once(agent, Task("x", metadata={"n": 3})).reward == 3.0
    with pytest.raises(ConfigError, match=r"unrecognized|arguments|Its options stand before the program"):
        load_agent("command:--reward reward.txt claude")
    with pytest.raises(ConfigError, match=r"has '\|', and no shell runs it"):
        load_agent("command:cat x | wc")
    (tmp_path / "command.py").write_text("def agent(task, llm): return 1.0\n")
    with pytest.raises(ConfigError, match=r"'command:env' is a function of your command.py and also"):
        load_agent("command:env")


def test_a_file_of_the_project_that_is_not_in_the_folder_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.sh").write_text("echo $0\n")
    monkeypatch.chdir(tmp_path)
    lightning.command("sh mine.sh {task.input}")
    assert "write {project}/mine.sh" in caplog.text
    assert run_once(lightning.command("sh {project}/mine.sh")).reward == 1.0


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_a_program_of_node_is_an_agent_with_agents_of_its_own() -> None:
    script = """
    const ask = async (model, text) => {
      const reply = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
        method: "POST",
        headers: {"content-type": "application/json", "authorization": "Bearer " + process.env.OPENAI_API_KEY},
        body: JSON.stringify({model, messages: [{role: "user", content: text}]}),
      });
      return (await reply.json()).choices[0].message.content;
    };
    const plan = await ask("policy:planner", process.argv[1]);
    process.exitCode = (await ask(process.env.OPENAI_MODEL, plan)) === "4" ? 0 : 1;
    """
    written = script.replace("{", "{{").replace("}", "}}")
    agent = lightning.command(["node", "--input-type=module", "-e", written, "{task.input}"])
    record = rollout(agent, "2 + 2?", ["add them", "4"])
    assert record.rollout.reward == 1.0
    assert [call.caller.agent for call in record.transitions] == ["planner", "node"]
    asked = [exchange.request["messages"][0]["content"] for exchange in read(record.transitions) if exchange]
    assert asked == ["2 + 2?", "add them"]

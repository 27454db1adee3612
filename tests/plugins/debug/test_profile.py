"""`lightning profile`: the parts of the time add up, and what is said to help does, by about as much."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.algorithms.lightning_rl import LightningRL
from lightning.cli.app import main
from lightning.config import Config, load_config, with_settings
from lightning.errors import ConfigError, DataError
from lightning.plugins import plugins
from lightning.store.protocol import MetricPoint, Store
from lightning.trainer.runs import describe_algorithm
from lightning.types import Outcome, Rollout, Run, Status, StepRecord, Task, ToolEvent, Transition, logprobs, token_ids
from lightning_debug.bottlenecks import TOKEN, Help, WhatIf, _prefixes, find_helps
from lightning_debug.profile import Interval, Profile, _tokens, read_profile, share_out
from lightning_planner.recorded import recorded_config

STEPS, TASKS, GROUP = 6, 2, 2
CALL, TOOL, CODE = 1.0, 4.0, 0.5
START = 1_800_000_000.0

MadeRun = dict[str, Any]


def call(rollout: str, seq: int, at: float, ended: float, prompt: list[int], length: int, tools: int = 0) -> Transition:
    return Transition(
        rollout, 1, seq, f"{rollout}/{seq}", token_ids(prompt), token_ids([7] * length), logprobs([0.0] * length),
        started_at=at, ended_at=ended, tool_calls=("tool",) * tools,
    )  # fmt: skip


async def record(
    store: Store,
    *,
    places: int = 4,
    tool: float = TOOL,
    code: float = CODE,
    start: float = 0.0,
    slots: int = 0,
    train: float = 1.0,
    seconds: Mapping[str, float] | None = None,
    teaching: int = TASKS,
    settings: Mapping[str, object] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """A run whose every time is known: a rollout calls, runs a tool, and calls again. `start` is how long its process takes to
    begin, `slots` how many calls run at once (0: all), `seconds` further phases of each step."""
    given_ = {"trainer.tasks_per_step": TASKS, "trainer.checkpoint_every": 1, "runner.concurrency": places}
    config = with_settings(Config(), given_ | dict(settings or {}))
    described = {
        "algorithm": describe_algorithm(LightningRL("grpo", group_size=GROUP)),
        "config": config.model_dump(mode="json"),
    }
    await store.put_run(Run("run", "run", described, START))
    now, points = START, []
    for step in range(1, STEPS + 1):
        groups = [f"run/{step}/{task}" for task in range(TASKS)]
        names = [(f"{group}/{index}", group, index) for group in groups for index in range(GROUP)]
        await store.create_rollouts(
            [Rollout(name, "run", Task(group[-1]), group, step=step, index=i) for name, group, i in names]
        )
        await store.lease("run", "worker", limit=len(names))
        began, server, waiting = now, [now] * (slots or 100), list(enumerate(names))
        starts: dict[int, float] = {}
        firsts: dict[int, float] = {}
        line: list[tuple[float, int]] = []

        def begin(at: float, left: Any = waiting, starts: Any = starts, line: Any = line) -> None:
            if left:
                place, _ = left.pop(0)
                starts[place] = at + start
                heapq.heappush(line, (at + start + code, place))

        for _ in range(places):
            begin(now)
        ended = now
        while line:  # in the order in which calls come to the server
            at, place = heapq.heappop(line)
            name, group, _ = names[place]
            prompt = [1, 2, 3, int(group[-1])]
            if place not in firsts:
                firsts[place] = await _served(store, name, 0, at, server, prompt, tools=1)
                heapq.heappush(line, (firsts[place] + tool, place))
                continue
            last = await _served(store, name, 1, at, server, [*prompt, *[7] * 10, 8], tools=0)
            reward = float(place % 2) if int(group[-1]) < teaching else 1.0
            event = ToolEvent("look", "ok", at=at)
            seconds_ = last - starts[place]
            await store.complete(name, 1, Outcome(reward=reward, seconds=seconds_, tool_events=(event,)))
            begin(last)
            ended = max(ended, last)
        phases = {"rollout": ended - began, "train": train, "checkpoint": 0.0, "update": 0.1} | dict(seconds or {})
        taught = tuple((name, 1) for name, group, _ in names if int(group[-1]) < teaching)
        await store.commit_step(
            StepRecord(
                "run",
                step,
                step,
                taught,
                ("d",) * len(taught),
                f"d{step}",
                groups=tuple(groups),
                metrics={"x": 0.0},
                at=ended + phases["train"] + phases["checkpoint"],
            )
        )
        now = ended + sum(phases.values()) - phases["rollout"]
        values = {f"seconds/{phase}": value for phase, value in phases.items()} | {"tokens": 15.0 * len(taught)}
        points.append(MetricPoint(step, values | dict(metrics or {}), now))
    store.metrics = lambda run: _answer(points)  # type: ignore[method-assign]  # with times that are not of now


async def _answer(points: list[MetricPoint]) -> list[MetricPoint]:
    return points


async def _served(
    store: Store, name: str, seq: int, at: float, server: list[float], prompt: list[int], tools: int
) -> float:
    slot = min(server)
    ended = max(slot, at) + CALL
    server[server.index(slot)] = ended
    await store.append([call(name, seq, at, ended, prompt, 10, tools)])
    return ended


def profiled(**made: Any) -> Profile:
    async def run() -> Profile:
        store = plugins().store("memory://")
        await store.open()
        await record(store, **made)
        found = await read_profile(store, "run")
        await store.close()
        return found

    return asyncio.run(run())


def helped(profile: Profile, cause: str) -> Help:
    found = {one.cause: one for one in find_helps(profile)}
    assert cause in found, sorted(found)
    return found[cause]


RUNS: list[MadeRun] = [
    {},
    {"places": 2},
    {"places": 1, "start": 2.0},
    {"seconds": {"checkpoint": 3.0, "eval": 2.0}, "settings": {"trainer.eval_every": 1}},
    {"slots": 1, "settings": {"policy_server.args": ["--max-num-seqs", "1", "--served-name", 'a "b"']}},
    {"settings": {"trainer.max_staleness": 1}},
    {"teaching": 1, "train": 9.0},
    {
        "settings": {
            "engine.tokens_per_microbatch": 16,
            "engine.step": "per-call",
            "engine.gradient_checkpointing": True,
        },
        "metrics": {"microbatches": 12.0, "tokens_forward": 180.0, "prefix_hit_share": 0.0},
        "train": 8.0,
    },
]


@pytest.mark.parametrize("made", RUNS)
def test_the_parts_are_the_wall_time_and_every_setting_is_legal(made: MadeRun) -> None:
    profile = profiled(**made)
    assert sum(profile.parts.values()) == pytest.approx(profile.seconds)
    assert min(profile.parts.values()) >= 0.0
    assert profile.seconds == pytest.approx(sum(step.wall for step in profile.steps))
    helps = find_helps(profile)
    worth = [one.saves * (0.5 if "trainer.max_staleness" in str(one.settings) else 1.0) for one in helps]
    assert worth == sorted(worth, reverse=True), "older tokens are a price"
    for one in helps:
        assert 0.03 <= one.saves < 1.0
        assert load_config(overrides=one.settings, env={}, base=recorded_config(profile.recorded.config))


def test_a_moment_belongs_in_equal_shares_to_those_who_work_then() -> None:
    profile = profiled()
    steps = len(profile.steps)
    assert steps == STEPS - 1, "processes start in the first"
    assert profile.parts["tools"] == pytest.approx(steps * TOOL)
    assert profile.parts["agent_code"] == pytest.approx(steps * CODE)
    assert profile.parts["prefill"] + profile.parts["decode"] == pytest.approx(steps * 2 * CALL)
    assert profile.parts["training"] == pytest.approx(steps * 1.0)
    assert profile.server_idle == pytest.approx(steps * (TOOL + CODE))
    assert profile.tools["look"] == pytest.approx(steps * TASKS * GROUP * TOOL)
    assert profile.tokens.sampled == steps * TASKS * GROUP * 20
    assert profile.tokens.trained == steps * TASKS * GROUP * 20


@given(st.lists(st.tuples(st.sampled_from(["tools", "decode"]), st.floats(0, 9), st.floats(0, 9)), max_size=8))
def test_shares_are_the_time_that_somebody_worked(raw: list[tuple[str, float, float]]) -> None:
    intervals = [Interval(state, min(a, b), max(a, b)) for state, a, b in raw]
    windows = [(1.0, 3.0), (4.0, 8.0)]
    shares, idle = share_out(intervals, windows)
    edges = sorted({edge for one in intervals for edge in (one.begin, one.end)} | {1.0, 3.0, 4.0, 8.0})
    spans = [(a, b) for a, b in itertools.pairwise(edges) if any(w[0] <= a and b <= w[1] for w in windows)]
    covered = sum(b - a for a, b in spans if any(one.begin <= a and b <= one.end for one in intervals))
    called = sum(
        b - a for a, b in spans if any(one.begin <= a and b <= one.end and one.state == "decode" for one in intervals)
    )
    assert sum(shares.values()) == pytest.approx(covered)
    assert idle == pytest.approx(6.0 - called)


SLOTS = {"policy_server.args": ["--max-num-seqs", "1"]}


@pytest.mark.parametrize(
    ("cause", "made", "cured"),
    [
        ("too few agents at once", {"places": 1}, {"places": 4}),
        ("slow tools", {}, {"tool": TOOL / 2}),
        ("slow agent code", {"code": 5.0}, {"code": 2.5}),
        ("process start", {"start": 6.0}, {"start": 6.0 / 16}),
        ("queue in vLLM", {"slots": 1, "settings": SLOTS, "tool": 0.0, "code": 0.0}, {"tool": 0.0, "code": 0.0}),
        (
            "evaluations",
            {"seconds": {"eval": 6.0}, "settings": {"trainer.eval_every": 1}},
            {},
        ),
        ("checkpoints", {"seconds": {"checkpoint": 6.0}}, {}),
    ],
)
def test_the_predicted_saving_is_that_of_a_run_made_so(cause: str, made: MadeRun, cured: MadeRun) -> None:
    before, after = profiled(**made), profiled(**cured)
    real = 1.0 - after.seconds / before.seconds
    found = helped(before, cause)
    assert found.saves == pytest.approx(real, rel=0.25), (found, real)
    ranked = [one.cause for one in find_helps(before) if one.of != TOKEN]
    assert cause in ranked[:2]


def test_sampling_while_training_saves_what_either_takes() -> None:
    found = helped(profiled(train=6.0), "sampling and training in turns")
    assert found.settings[0].startswith("trainer.max_staleness=")
    assert found.saves == pytest.approx(0.45, abs=0.12), "6.5 s of sampling and 6.1 s of the trainer, at once"


@pytest.mark.parametrize(("args", "helps"), [(["--block-size=4"], True), (["--block-size", "4"], True), ([], False)])
def test_more_room_is_no_help_where_prompts_have_no_whole_block_in_common(args: list[str], helps: bool) -> None:
    profile = profiled(metrics={"prefix_hit_share": 0.0}, settings={"policy_server.args": args})
    what_if = WhatIf.of(profile)
    assert what_if is not None
    found = [*_prefixes(profile, recorded_config(profile.recorded.config), what_if)]
    assert ["give it more room" in one.text for one in found] == [True] * helps


def test_groups_that_teach_nothing_are_counted_by_reason() -> None:
    profile = profiled(teaching=1)
    assert profile.tokens.untaught == {"all_rewards_equal": (STEPS - 1) * GROUP * 20}
    assert profile.tokens.useful == 0.5
    found = helped(profile, "groups that teach nothing")
    assert found.of == TOKEN
    assert all(rollout.split("/")[2] == "1" for rollout in found.rollouts), "those of the group that taught nothing"


def test_each_sampled_token_is_in_one_count() -> None:
    """Of two groups that teach nothing one has a failed rollout, one a cancelled one; a trained one failed, too."""
    profile = profiled(teaching=1)
    status = {"2/1/0": Status.FAILED, "2/0/0": Status.FAILED, "3/1/0": Status.CANCELLED}
    took = [
        replace(each, status=how, reward=None) if (how := status.get(each.id.removeprefix("run/"))) else each
        for each in profile.rollouts
    ]
    found = _tokens(took, profile.records, profile.steps, profile.activities, "exclude")
    assert (found.trained, found.failed, found.cancelled) == (profile.tokens.trained, 20, 20)
    assert found.untaught["cancelled"] == 20, "nobody can say that too few of them would have succeeded"
    assert found.sampled == found.trained + found.failed + found.cancelled + sum(found.untaught.values())


def test_nothing_is_said_to_help_that_a_run_has_or_cannot_have() -> None:
    assert helped(profiled(teaching=1), "groups that teach nothing").settings == ("trainer.order=learnable",)
    half = profiled(teaching=1)
    most_teach = replace(half, tokens=replace(half.tokens, untaught={"all_rewards_equal": half.tokens.sampled // 4}))
    for profile in (profiled(teaching=1, settings={"trainer.order": "learnable"}), most_teach):
        found = helped(profile, "groups that teach nothing")
        assert found.settings == ()
        assert "dynamic_sampling=true" in found.text
    slow: MadeRun = {"seconds": {"update": 5.0}, "settings": {"policy_server.weight_transfer": "file"}}
    assert helped(profiled(**slow), "weight update").settings == ("policy_server.weight_transfer=auto",)
    slow["settings"]["policy_server.attach"] = "http://127.0.0.1:8000"
    assert helped(profiled(**slow), "weight update").settings[0].startswith("trainer.tasks_per_step=")


async def test_a_run_of_which_nothing_can_be_said_is_refused() -> None:
    store = plugins().store("memory://")
    await store.open()
    await store.put_run(Run("run", "run"))
    with pytest.raises(DataError, match="no committed step"):
        await read_profile(store, "run")
    await record(store)
    with pytest.raises(ConfigError, match="has the steps 1 to 6"):
        await read_profile(store, "run", 9)
    store.metrics = lambda run: _answer([])  # type: ignore[method-assign]
    with pytest.raises(DataError, match="no recorded times"):
        await read_profile(store, "run")
    await store.close()


def test_the_command_prints_tables_or_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def fill() -> None:
        store = plugins().store(f"sqlite:///{tmp_path / 'lightning.db'}")
        await store.open()
        log, commit = store.metrics, store.commit_step
        store.commit_step = lambda record: commit(replace(record, at=0.0))  # type: ignore[method-assign]
        await record(store)
        for point in await store.metrics("run"):
            await store.log_metrics("run", point.step, point.values)
        store.metrics = log  # type: ignore[method-assign]
        await store.close()

    asyncio.run(fill())
    (tmp_path / "run.json").write_text(json.dumps({"id": "run"}))
    assert exit_code("profile", str(tmp_path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert {"cause", "text", "set", "saves", "evidence"} <= found["helps"][0].keys()
    assert any("clocks" in note for note in found["notes"]), "the steps were written now, the calls at other times"
    assert exit_code("profile", str(tmp_path), "--steps", "1:3") == 0
    assert "steps 1 to 2" in capsys.readouterr().out
    assert exit_code("profile", str(tmp_path), "--steps", "x") == 2
    assert "write A:B" in capsys.readouterr().err


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code or 0

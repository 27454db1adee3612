"""The quest: its rules, its tasks, its agent against a scripted policy server behind the real gateway, and its demo."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.batch.trajectory import Group, Trajectory
from lightning.config import Config, GatewayConfig, RunnerConfig, with_settings
from lightning.credit.assign import state_ids
from lightning.gateway import Gateway, Upstream
from lightning.runner.inline import InlineRunner
from lightning.runner.lease_loop import work
from lightning.store.memory import MemoryStore
from lightning.testing.fake_vllm import FakeVLLM, Reply
from lightning.types import Rollout, Run, Status, Task, ToolEvent, Transition
from lightning_examples.quest_python import demo as demonstration
from lightning_examples.quest_python import world
from lightning_examples.quest_python.agent import EXAMPLES, MAX_CALLS, agent, ask, messages, read
from lightning_examples.quest_python.tasks import PAIRS, TREASURES, make_task, quest_of, tasks, val_tasks
from lightning_examples.quest_python.world import (
    GATES,
    ROOMS,
    SIDES,
    Quest,
    Room,
    State,
    choices,
    choose,
    is_over,
    worth,
)

CHOICES = GATES + ROOMS
quests = st.integers(0, 2**32).map(lambda seed: quest_of(make_task(random.Random(seed), PAIRS[seed % len(PAIRS)])))
choosers = st.lists(st.integers(0, 2), min_size=CHOICES, max_size=CHOICES)


def go(quest: Quest, chooser: Callable[[State], str], state: State | None = None) -> list[State]:
    """All states from the given one, or the first, to the last."""
    states = [state or State()]
    while not is_over(quest, states[-1]):
        states.append(choose(quest, states[-1], chooser(states[-1])))
    return states


# --- the rules --------------------------------------------------------------------------------------------------------


@given(quests)
def test_who_knows_the_rules_gets_everything_in_eight_choices(quest: Quest) -> None:
    states = go(quest, lambda state: world.best(quest, state))
    assert len(states) - 1 == CHOICES == 8
    assert CHOICES <= MAX_CALLS <= 12
    assert worth(quest, states[-1]) == pytest.approx(1.0)


@given(quests, choosers)
def test_a_key_that_was_taken_stays_taken_and_rewards_are_from_0_to_1(quest: Quest, numbers: Sequence[int]) -> None:
    states = go(quest, lambda state: choices(state)[numbers[len(state.keys) + state.room]])
    for before, after in pairwise(states):
        assert after.keys[: len(before.keys)] == before.keys
        assert (len(after.keys), after.room) > (len(before.keys), before.room)
    assert 0.0 <= worth(quest, states[-1]) <= 1.0
    assert all(world.opened(quest, state) == 0 for state in states[:-1]), "the gates come last"


@given(quests, st.integers(0, 1), st.integers(0, 1))
def test_a_wrong_key_cannot_be_made_good_later(quest: Quest, wrong: int, other: int) -> None:
    def chooser(state: State) -> str:
        right = world.best(quest, state)
        if len(state.keys) == wrong:
            return [choice for choice in choices(state) if choice != right][other]
        return right

    states = go(quest, chooser)
    assert states[-1].treasures == ROOMS, "everything after it was as good as can be"
    assert worth(quest, states[-1]) == pytest.approx(world.TREASURES + world.OPENED[wrong])


@given(quests, st.integers(0, ROOMS - 1))
def test_a_choice_in_a_room_is_worth_its_treasure_and_no_more(quest: Quest, room: int) -> None:
    def chooser(state: State) -> str:
        right = world.best(quest, state)
        return (
            next(side for side in SIDES if side != right) if choices(state) == SIDES and state.room == room else right
        )

    assert worth(quest, go(quest, chooser)[-1]) == pytest.approx(1.0 - world.TREASURES / ROOMS)


@given(quests)
def test_what_cannot_be_chosen_is_refused(quest: Quest) -> None:
    for choice in ("left", "gold", ""):
        with pytest.raises(ValueError, match="cannot be chosen"):
            choose(quest, State(), choice)
    with pytest.raises(ValueError, match="cannot be chosen"):
        choose(quest, State(("red", "red"), ROOMS), "left")


def test_each_gate_is_opened_by_one_key() -> None:
    gates = [gate for names in world.KEYS.values() for gate in names]
    assert len(set(gates)) == len(gates)
    assert [gate for gate in gates if sum(world.opens(key, gate) for key in world.COLOURS) != 1] == []


def test_chance_gets_a_fifth() -> None:
    """A third of the treasures, the first gate in a third of the quests, and both in a ninth."""
    rng = random.Random(0)
    rewards = []
    for task in tasks(2000, 0):
        quest = quest_of(task)
        rewards.append(worth(quest, go(quest, lambda state: rng.choice(choices(state)))[-1]))
    mean, error = sum(rewards) / len(rewards), math.sqrt(0.25 / len(rewards))
    assert abs(mean - (0.3 / 3 + 0.2 / 3 + 0.5 / 9)) < 3 * error


# --- the tasks --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_training_and_held_out_quests_are_never_the_same(seed: int) -> None:
    train = [str(task.input) for task in tasks(300, seed)]
    assert len(set(train)) == 300
    assert train == [task.input for task in tasks(300, seed)]
    assert not set(train) & {task.input for task in val_tasks(200)}


def test_a_demonstration_has_tasks_enough_and_the_examples_are_none() -> None:
    made = [quest_of(task) for task in [*tasks(4000, 0), *val_tasks(200)]]
    assert len(set(made)) == 4200
    shown = " ".join(question for question, _ in EXAMPLES)
    assert not [quest for quest in made if any(gate in shown for gate in quest.gates)]


def test_a_step_of_the_demonstration_has_each_pair_of_colours_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(demonstration, "model_folder", lambda: tmp_path)
    demo = demonstration.demo()
    config = with_settings(Config(), demo.settings).trainer
    assert (config.order, config.tasks_per_step) == ("given", len(PAIRS))
    made = [quest_of(task) for task in demo.tasks(120, 3)]
    for step in range(0, 120, config.tasks_per_step):
        quests = made[step : step + config.tasks_per_step]
        keys = [tuple(key for gate in quest.gates for key in world.KEYS if world.opens(key, gate)) for quest in quests]
        assert sorted(keys) == sorted(PAIRS)


# --- the agent --------------------------------------------------------------------------------------------------------

SIX_ROOMS = [[name, side] for name, side in zip(TREASURES, (*SIDES, *SIDES), strict=False)]
TASK = Task("Gates of ice and grass.", metadata={"gates": ["ice", "grass"], "rooms": SIX_ROOMS})
BEST = ("blue", "green", *SIDES, *SIDES)


@dataclass(frozen=True)
class Played:
    rollout: Rollout
    requests: Sequence[dict[str, Any]]
    calls: Sequence[Transition]
    events: Sequence[ToolEvent]


async def play(*replies: str) -> Played:
    """One rollout with scripted replies: what it came to, and what the server and the store saw."""
    config = RunnerConfig(concurrency=1, timeout=60)
    store, runner = MemoryStore(), InlineRunner(agent, config)
    await store.open()
    await store.put_run(Run("run", "run"))
    await store.create_rollouts([Rollout("r", "run", TASK, "g")])
    async with FakeVLLM(model="policy") as fake:
        fake.queue(*(Reply(text) for text in replies))
        gateway = Gateway(store, [Upstream(fake.url, fake.model)], GatewayConfig(), secret=b"s" * 32)
        await gateway.start()
        await runner.start()
        try:
            await work(store, runner, "run", gateway.llm, worker="w", config=config, line=gateway.parts.line)
        finally:
            await runner.close()
            await gateway.close()
        requests = [dict(request.body) for request in fake.requests]
    (rollout,) = (await store.list_rollouts("run")).items
    events = list((await store.attempts_of([("r", None)]))[0].tool_events)
    played = Played(rollout, requests, await store.transitions("r"), events)
    await store.close()
    return played


async def test_the_best_answers_get_everything_and_each_is_a_call_and_a_tool() -> None:
    played = await play(*BEST)
    assert (played.rollout.status, played.rollout.error) == (Status.SUCCEEDED, "")
    assert played.rollout.reward == pytest.approx(1.0)
    assert (played.rollout.rewards["reached"], played.rollout.rewards["treasures"]) == (1.0, 1.0)
    assert len(played.requests) == len(BEST)
    assert [event.name for event in played.events] == ["take"] * 2 + ["look", "search"] * ROOMS + ["open_gate"] * 2
    assert {event.status for event in played.events} == {"ok"}


async def test_the_first_gate_that_stays_closed_ends_it() -> None:
    played = await play("red", *BEST[1:])
    assert played.rollout.reward == pytest.approx(world.TREASURES)
    assert [(event.name, event.result or event.output) for event in played.events][-1] == ("open_gate", "false")
    assert [event.name for event in played.events].count("open_gate") == 1


async def test_an_answer_that_is_no_choice_is_a_wasted_move() -> None:
    wasted = ["", "red", "ahead or", "the left"]
    played = await play(*BEST[:3], *wasted, *BEST[3:])
    assert played.rollout.reward == pytest.approx(1.0), "there are as many moves to spare"
    prompts = [request["messages"] for request in played.requests]
    assert prompts[3:8] == [prompts[3]] * 5, "the same is asked again"
    assert len(prompts) == MAX_CALLS


async def test_when_all_moves_are_wasted_the_gates_are_not_met() -> None:
    played = await play(*BEST[:-1], *["?"] * 5)
    assert (played.rollout.status, len(played.requests)) == (Status.SUCCEEDED, MAX_CALLS)
    assert played.rollout.reward == pytest.approx(world.TREASURES * 5 / 6)
    assert "open_gate" not in [event.name for event in played.events]


async def test_rollouts_meet_again_in_the_same_state_for_credit_that_compares_there() -> None:
    """Two rollouts differ in one room: gigpo's states are the same before it and after it."""
    ways = [await play(*BEST), await play(*BEST[:4], "right", *BEST[5:])]
    members = [Trajectory(way.rollout, tuple(way.calls), (True,) * len(way.calls)) for way in ways]
    first, second = state_ids(Group("g", tuple(members)))
    assert len(set(first)) == CHOICES
    assert list(first) == list(second)
    wrong = await play("red", *BEST[1:])
    member = Trajectory(wrong.rollout, tuple(wrong.calls), (True,) * CHOICES)
    first, other = state_ids(Group("g", (members[0], member)))
    assert [one == two for one, two in zip(first, other, strict=True)] == [True] + [False] * (CHOICES - 1)


@given(quests, choosers, choosers)
def test_a_prompt_tells_all_that_decides_what_can_still_be_earned(
    quest: Quest, one: Sequence[int], two: Sequence[int]
) -> None:
    """Where two rollouts of a quest meet the same prompt, the same choices from there on earn both the same."""
    states = [
        go(quest, lambda state, numbers=numbers: choices(state)[numbers[len(state.keys) + state.room]])
        for numbers in (one, two)
    ]
    for first, second in zip(states[0][:-1], states[1][:-1], strict=True):
        if ask(quest, first) == ask(quest, second):
            ends = [go(quest, lambda state: world.best(quest, state), start)[-1] for start in (first, second)]
            earned = [worth(quest, end) - world.TREASURES * start.treasures / ROOMS
                      for end, start in zip(ends, (first, second), strict=True)]  # fmt: skip
            assert earned[0] == pytest.approx(earned[1])


@pytest.mark.parametrize(
    ("reply", "choice"),
    [("red", "red"), (" Red.\n", "red"), ("left", None), ("redd", None), ("", None), ("a red", None)],
)
def test_a_choice_is_read_from_its_word_alone(reply: str, choice: str | None) -> None:
    assert read(reply, State()) == choice


def test_the_examples_are_questions_as_they_are_asked_and_right_answers() -> None:
    form = re.compile(r"Quest: a gate of (\w+), then a gate of (\w+)\.\nYou carry (.*?)\..*\n(.*)")
    for question, answer in EXAMPLES:
        first, second, carried, last = form.findall(question)[0]
        keys = tuple(re.findall(r"a (\w+) key", carried))
        found = re.findall(r"The (\w+) are (\w+)", last)
        treasure, side = found[0] if found else ("gems", "left")
        quest, state = Quest((first, second), (Room(treasure, side),) * ROOMS), State(keys)
        assert question == ask(quest, state)
        assert read(answer, state) == answer
        assert answer == side or len(keys) < GATES
    roles = [message["role"] for message in messages(quest, State())]
    assert roles == ["system", *["user", "assistant"] * len(EXAMPLES), "user"]


def test_the_demo_s_settings_are_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(demonstration, "model_folder", lambda: tmp_path)
    demo = demonstration.demo()
    config = with_settings(Config(), demo.settings)
    assert (demo.name, demo.measure, demo.model) == ("quest", "reward", tmp_path)
    assert config.engine.dtype == config.policy_server.dtype, "vLLM and the trainer compute alike"
    assert demo.source is not None
    assert demo.source.is_file()

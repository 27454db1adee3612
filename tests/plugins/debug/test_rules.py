"""What the record of some attempts says is wrong."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from lightning.runner.attempt_completion import NEVER_CALLED
from lightning.types import TOO_LONG, Caller, CallStatus, ToolEvent, Transition, logprobs, token_ids
from lightning_debug.diagnosis import Attempted
from lightning_debug.rules import LENGTH, diagnose, further
from lightning_policies.config import PolicyConfig
from lightning_record.exchanges import TEXTS, Flag, pack, why_not_replayable

WRITER = Caller("writer", ("crew", "writer"))


def call(status: CallStatus = CallStatus.OK, caller: Caller = WRITER, **fields: object) -> Transition:
    return Transition("r", 1, 0, "c", token_ids([1]), token_ids([2]), logprobs([-1.0]), caller, status=status, **fields)


def refused(error: str, code: str = "invalid_parameter") -> Transition:
    return call(CallStatus.REFUSED, finish_reason=code, error=error)


def test_refused_calls_are_one_finding_for_each_cause() -> None:
    calls = [
        refused("'n' must be at most 8, not 9."),
        refused("'n' must be at most 8, not 12."),
        refused("no", "other"),
    ]
    first, second = diagnose([Attempted(calls[:1], ()), Attempted(calls[1:], ())])
    assert first.text == "crew/writer: 2 refused calls (invalid_parameter): 'n' must be at most 8, not 9."
    assert second.text == "crew/writer: 1 refused call (other): no"
    assert first.serious
    assert first.cause != second.cause
    assert [each.cause for each in diagnose([Attempted(calls[1:2], ())])] == [first.cause], (
        "numbers make no other cause"
    )


def test_a_call_that_was_too_long_has_words_of_its_own() -> None:
    assert diagnose([Attempted([refused("no", TOO_LONG)], ())]) == []


def test_rollouts_that_cannot_be_run_again_are_counted_by_the_reason() -> None:
    def packed(flags: Flag) -> bytes:
        return pack("/chat", 200, b"{}", b"{}", flags=flags)

    whole, redacted, large = (call(extras={TEXTS: packed(flags)}) for flags in (Flag(0), Flag.REDACTED, Flag.TOO_LARGE))
    lost = ToolEvent("add", "ok", incomplete=True)
    attempts = [
        Attempted([whole], ()),
        *[Attempted([whole, redacted], ())] * 2,
        Attempted([large], ()),
        Attempted([whole], (lost,)),
    ]
    found = diagnose(attempts)
    assert [each.text.partition(" rollouts")[0] for each in found] == ["2 of 5", "1 of 5", "1 of 5"]
    assert [word in each.text for word, each in zip(("credential was", "4 MiB", "tool"), found, strict=True)] == [
        True
    ] * 3
    assert all(each.minor and not each.serious for each in found)
    assert diagnose([Attempted([call()], ())]) == [], "requests were not to be recorded"
    assert why_not_replayable([call()], ()).startswith("requests were not recorded")


def test_a_long_refusal_is_cut() -> None:
    (found,) = diagnose([Attempted([refused("x" * 5000)], ())])
    assert len(found.text) < 500


def test_tools_that_were_asked_for_and_never_reported() -> None:
    asked = call(tool_calls=("a", "b"))
    (found,) = diagnose([Attempted([asked], ()), Attempted([call()], ())])
    assert found.text.startswith("the model asked for 2 tool runs, and no tool run was reported")
    assert not found.serious
    assert diagnose([Attempted([asked], ()), Attempted([call()], (ToolEvent("add", "ok"),))]) == []
    assert diagnose([Attempted([call()], ())]) == []


def test_calls_without_a_name_beside_calls_with_one() -> None:
    (found,) = diagnose([Attempted([call(), call(), call(caller=Caller("agent"))], ())])
    assert found.text.startswith("1 of 3 calls have no agent's name, though others have one (crew/writer)")
    assert diagnose([Attempted([call(caller=Caller("agent"))] * 3, ())]) == [], (
        "an agent that names nothing has one agent"
    )


def test_several_models_are_listed_with_the_line_that_leaves_each_out() -> None:
    calls = [call(requested_model="big", started_at=at) for at in (1.0, 2.0)]
    judge = call(caller=Caller("judge"), requested_model="small", started_at=4.0)
    first, second = diagnose([Attempted([*calls, judge], (ToolEvent("add", "ok", at=3.0),))] * 2)
    assert first.text.startswith("4 calls asked for the model 'big': crew/writer (4). The policy answers them")
    assert "is it a judge? To leave them out of training: train_agents=['!model:small']" in second.text
    assert "judge?" not in first.text
    assert diagnose([Attempted(calls, ())]) == [], "one name is the agent's own business"


def test_a_model_that_is_asked_for_between_tools_is_no_judge() -> None:
    calls = [call(requested_model=name, started_at=at) for name, at in (("a", 1.0), ("b", 2.0), ("b", 4.0))]
    assert not any("judge" in found.text for found in diagnose([Attempted(calls, (ToolEvent("add", "ok", at=3.0),))]))


def test_an_answer_for_which_there_was_less_room() -> None:
    (found,) = diagnose([Attempted([call(max_tokens_asked=4096), call(max_tokens_asked=9), call()], ())])
    assert found.text.startswith("2 calls asked for more tokens (up to 4096) than policy_server.max_model_len leaves")


def test_calls_of_a_framework_without_adapter_name_it_and_whom_they_belong_to() -> None:
    crew = Caller("solve", ("solve",), framework="no-adapter:crewai")
    (found,) = diagnose([Attempted([call(caller=crew), call(caller=crew)], ())])
    assert found.text.startswith("2 calls of crewai have no name of its agents, and its tools are not seen")
    assert "All its agents are solve." in found.text
    assert not found.serious


def test_a_reward_without_a_call_where_others_called_is_a_cache() -> None:
    failures = [f"{NEVER_CALLED}", f"{NEVER_CALLED}", "KeyError: 'x'"]
    (found,) = diagnose([Attempted([call()], ())], failures=failures)
    assert found.text.startswith(
        "2 rollouts returned a reward with 0 model calls, and 1 others called the model. Is it a cache"
    )
    assert found.serious
    (found,) = diagnose([], failures=failures)
    assert "llm.base_url" in found.text
    assert diagnose([Attempted([call()], ())], failures=failures[2:]) == []


def test_a_glob_that_matches_no_agent() -> None:
    attempts = [Attempted([call(), call(caller=Caller("planner"))], ())]
    meant, unknown = diagnose(attempts, ["planner", "wrtier", "zzz"])
    assert "did you mean 'writer'?" in meant.text
    assert (meant.serious, meant.minor) == (True, False)
    assert unknown.text.startswith("no call matched 'zzz' of train_agents; is it misspelt,")
    assert (unknown.serious, unknown.minor) == (False, True)
    assert diagnose(attempts, ["zzz"]) == [], "where nothing is trained that is said with the reason"
    assert diagnose(attempts, ["writer", "!planner", "model:x"]) == []


def test_a_glob_of_a_policy_that_matches_no_call() -> None:
    attempts = [Attempted([call(requested_model="big"), call(caller=Caller("planner"), requested_model="big")], ())]
    policies = {
        "writes": PolicyConfig(agents=("wrtier", "zzz", "!planner")),
        "plans": PolicyConfig(agents=("planner",), models=("big*", "small*")),
    }
    meant, unknown, model = diagnose(attempts, ["!policy:base"], policies=policies)
    seen = "Agents seen: crew/writer, planner"
    assert meant.text == f"no call matched 'wrtier' of policies.writes.agents; did you mean 'writer'? {seen}"
    assert meant.serious
    assert unknown.text.startswith("no call matched 'zzz' of policies.writes.agents; is it misspelt,")
    assert model.text == "no call matched 'small*' of policies.plans.models. Models that were asked for: big"
    assert unknown.minor
    assert model.minor
    (same, *_) = diagnose(attempts, ["nobody"], policies=policies)
    assert same == meant, "also where nothing is trained"
    assert diagnose([], policies=policies) == [], "without a call nothing is known of globs"


def test_models_that_are_given_to_policies_need_no_word() -> None:
    calls = [call(requested_model=name) for name in ("big", "small")]
    assert len(diagnose([Attempted(calls, ())])) == 2
    assert diagnose([Attempted(calls, ())], policies={"writes": PolicyConfig(models=("big", "small"))}) == []


WORDS = random.Random(0)


def words(count: int = 2 * LENGTH) -> list[int]:
    return [WORDS.randrange(5000) for _ in range(count)]


def said(rollout: str, prompt: list[int], response: list[int], at: float, **fields: object) -> Transition:
    return Transition(
        rollout, 1, 0, "c", token_ids(prompt), token_ids(response), logprobs([-1.0] * len(response)),
        started_at=at, ended_at=at + 1, **{"caller": WRITER, **fields},
    )  # fmt: skip


def remembered(*rollouts: list[Transition]) -> list[str]:
    found = diagnose(Attempted(calls, ()) for calls in rollouts)
    return [each.text for each in found if each.cause == "shared memory"]


def test_what_one_rollout_answered_in_the_first_prompt_of_another() -> None:
    answer, task, other = words(), words(), words()
    first = [said("one", task, answer, 0.0)]
    (text,) = remembered(
        first, [said("two", task + answer + other, words(), 2.0)], [said("three", other, words(), 2.0)]
    )
    assert text.startswith(
        "prompts of 1 of 3 rollouts hold what another rollout had answered (that of two an answer of one)"
    )
    assert remembered(first, [said("two", task + answer, words(), 0.5)]) == [], "it was not said yet"
    assert remembered(first, [said("two", answer[: LENGTH - 1] + other, words(), 2.0)]) == [], "too little to tell"


def test_what_every_prompt_has_is_no_memory() -> None:
    """A model that repeats its instructions, a task or a document; whatever the others' prompts have of it."""
    system, task = words(), words()
    repeats = [said("one", system + task, system, 0.0)]
    assert remembered(repeats, [said("two", system + words(), words(), 2.0)]) == []
    document = words()
    siblings = [[said(name, task + document, words(), at)] for name, at in (("two", 0.2), ("three", 5.0))]
    assert remembered([said("one", words(), document, 0.0)], *siblings) == [], "it stood in a prompt before"


def test_equal_answers_of_siblings_and_ones_own_answers_are_no_memory() -> None:
    """Greedy rollouts of one task say the same and have it in their next prompts; a template rewrites tool calls."""
    task, answer = words(), words()
    greedy = [
        [said(name, task, answer, at), said(name, task + answer, words(), at + 2)]
        for name, at in (("a", 0.0), ("b", 0.5))
    ]
    assert remembered(*greedy) == []
    own, rewritten = words(), words()
    theirs = [said("a", words(), rewritten, 0.0, tool_calls=("t",))]
    ours = [said("b", task, own, 0.0, tool_calls=("t",)), said("b", task + rewritten, words(), 2.0)]
    assert remembered(theirs, ours) == []


def test_a_memory_that_shows_later_in_the_rollout_of_another_task() -> None:
    answer, task = words(), words()
    ours = [said("b", task, words(), 0.0), said("b", task + answer, words(), 2.0)]
    assert len(remembered([said("a", words(), answer, 0.0)], ours)) == 1


def test_a_conversation_is_looked_through_once_and_not_once_for_each_call() -> None:
    """Of the prompts of two agents that take turns."""
    calls, prompts = [], {"a": words(), "b": words()}
    for turn in range(60):
        agent = "ab"[turn % 2]
        calls.append(said("one", prompts[agent], words(), turn, caller=Caller(agent)))
        prompts[agent] = prompts[agent] + words()
    looked_at = [len(ids) for _, ids in further(calls)]
    assert looked_at[2:] == [3 * LENGTH - 1] * 58


def test_a_reward_that_follows_length_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(tokens: int, reward: float, group: int) -> Attempted:
        one = replace(call(), response_ids=token_ids(range(tokens)), logprobs=logprobs([-1.0] * tokens))
        return Attempted([one], (), reward, f"g{group}")

    longer = [said(length + 1, length / 8, group) for group in range(3) for length in range(8)]
    (found,) = diagnose(longer)
    assert found.text.startswith(
        "the reward follows the length of what is said: of 84 pairs of rollouts of one task that earned differently, "
        "the longer one earned more in 84 (100%). "
    )
    monkeypatch.delattr("lightning_debug.rules._as_ordered")  # nothing is shuffled where the pairs themselves say no
    brief = [said(9 - length, length / 8, group) for group in range(3) for length in range(8)]
    assert diagnose(brief) == [], "to be brief is often to be right"
    mixed = [said(3 + (length * 5) % 8, length // 2, group) for group in range(4) for length in range(8)]
    assert diagnose(mixed) == []
    assert diagnose(longer[:8]) == [], "too few to say"


def test_a_part_that_explains_the_reward_is_no_length_and_the_strongest_length_is_named() -> None:
    def said(calls: int, reward: float, correct: float, group: int) -> Attempted:
        ids = token_ids(range(int(20 * correct), int(20 * correct) + 9 - calls))
        one = replace(call(), response_ids=ids, logprobs=logprobs([-1.0] * len(ids)))
        return Attempted([one] * calls, (), reward, f"g{group}", {"correct": correct})

    paid = [
        said(1 + calls, float(right) + calls / 9, right, group)
        for group in range(4)
        for right in (0, 1)
        for calls in range(7)
    ]
    (found,) = diagnose(paid)
    assert "pairs of rollouts of one task with equal correct that earned differently" in found.text
    assert "the one with more calls earned more in 168 (100%). From 80% on this is an alarm" in found.text
    assert "in 1 of 1000 cases. " in found.text
    assert found.text.startswith("the reward follows the number of calls: of ")
    right = [said(1 + calls, float(calls > 3), float(calls > 3), group) for group in range(4) for calls in range(8)]
    assert diagnose(right) == [], "what is right takes more calls: its correctness explains the reward"
    used = [said(1 + calls, 0.2 * (calls > 3), 0.0, group) for group in range(8) for calls in range(8)]
    assert diagnose(used) == [], "two values say yes or no, such as whether a tool was used"


def test_a_step_that_earned_the_same_because_a_tool_failed_is_named() -> None:
    def tried(group: int, reward: float = 0.0, status: str = "error") -> Attempted:
        error = "Traceback\nValueError: display overflow" if status == "error" else ""
        return Attempted([call()], (ToolEvent("calculate", status, error=error),), reward, f"g{group}")

    (found,) = diagnose([*(tried(number % 2) for number in range(6)), tried(0, status="ok")])
    assert found.text.startswith(
        "all 7 rollouts of 2 tasks earned 0.000, and 6 of them had a failed tool run (most often calculate failed with "
        "'ValueError: display overflow', 6 times): the tool may not be able to do these tasks."
    )
    assert diagnose([tried(0), tried(1), tried(1, 1.0)]) == [], "one of them earned something"
    assert diagnose([tried(0), tried(1, status="ok")]) == [], "half of them are not most"


def test_a_grader_that_judges_the_same_words_differently_is_named() -> None:
    def attempt(reward: float | None, answer: int, group: str = "g") -> Attempted:
        return Attempted([call(), replace(call(), response_ids=token_ids([answer]))], (), reward, group)

    def causes(attempts: list[Attempted]) -> list[str]:
        return [each.text for each in diagnose(attempts) if each.cause == "unequal grades"]

    alike = [attempt(float(n % 2), 7) for n in range(6)]
    (text,) = causes([*alike, attempt(None, 7), attempt(1.0, 8), attempt(1.0, 7, "other")])
    assert text.startswith("9 of 15 pairs of rollouts of one task")
    assert causes([attempt(float(n % 2), n % 2) for n in range(6)]) == [], "they said different things"
    assert causes([attempt(1.0, 7) for _ in range(6)]) == []
    assert causes([attempt(float(n % 2), 7, str(n)) for n in range(6)]) == [], "other tasks"
    assert causes(alike[:3]) == [], "too few to say so"


def test_a_tool_whose_service_fails_is_told_from_one_that_the_model_asks_wrongly() -> None:
    down = ToolEvent("search", "error", error="ConnectionError: search service: 503 upstream")
    wrong = ToolEvent("search", "error", error="ValueError: no such column: 500")
    fine = ToolEvent("search", "ok")
    (found,) = diagnose([Attempted([call()], (down, *[fine] * 3))] * 4)
    assert found.cause == "failing tools/search"
    assert found.text.startswith(
        "the tool search failed in 4 of 16 runs, and not by the model's doing (ConnectionError"
    )
    assert found.serious
    assert diagnose([Attempted([call()], (wrong, *[fine] * 3))] * 4) == []
    assert diagnose([Attempted([call()], (down,) * 9)]) == [], "nine runs are few"

"""A branch begins as its parent did, from the record alone, and is sampled from a call on; one that does not is void."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import lightning
import pytest
from lightning.errors import StoreError
from lightning.gateway import call as gateway_call
from lightning.testing import Reply, vllm_replies
from lightning.trainer.agents import HowToCall
from lightning.types import LLM, CallStatus, Fault, Rollout, Status, Task, Transition
from lightning_branching import branch_answers
from lightning_branching.branch_answers import BranchedAttempt, Branches
from lightning_branching.divergence import diverged
from lightning_branching.recorded import recorded_rollout
from lightning_branching.stage import BranchesStage
from lightning_record import exchanges
from lightning_record.exchanges import Parent

from tests.plugins.branching.branching import Brancher, brancher, numbered


@pytest.fixture
def made() -> Iterator[Brancher]:
    with brancher(numbered()) as found:
        yield found


def ask(llm: LLM, content: str, **more: Any) -> str:
    body = {"model": llm.model, "messages": [{"role": "user", "content": content}], **more}
    reply = httpx.post(
        f"{llm.base_url}/chat/completions", json=body, headers={"authorization": f"Bearer {llm.api_key}"}, timeout=60
    )
    if reply.is_error:
        raise RuntimeError(reply.json()["error"]["message"])
    return str(reply.json()["choices"][0]["message"]["content"])


def chain(length: int = 4) -> Callable[[Task, LLM], float]:
    """Each call asks with all that was said."""

    def agent(task: Task, llm: LLM) -> float:
        said = str(task.input)
        for _ in range(length):
            said += f" | {ask(llm, said)}"
        return float(said.rpartition(" ")[2])

    return agent


def test_only_what_follows_is_sampled_and_recorded(made: Brancher) -> None:
    parent = made.run(chain())
    assert [call.status for call in parent.calls] == [CallStatus.OK] * 4
    before = made.sampled
    found = [made.run(chain(), parent=parent.key(3)) for _ in range(8)]
    assert made.sampled - before == 8 * 2
    for each in found:
        assert each.rollout.status is Status.SUCCEEDED, each.rollout.error
        assert each.rollout.parent == parent.key(3)
        assert [call.seq for call in each.calls] == [0, 1]
        assert list(each.calls[0].prompt_ids) == list(parent.calls[2].prompt_ids)  # bit for bit the same state
    assert len({each.rollout.reward for each in found}) == 8


def test_a_branch_at_the_first_call_is_another_rollout(made: Brancher) -> None:
    parent = made.run(chain(2))
    found = made.run(chain(2), parent=parent.key(1))
    assert len(found.calls) == 2
    assert list(found.calls[0].prompt_ids) == list(parent.calls[0].prompt_ids)


def test_streams_are_answered_as_streams(made: Brancher) -> None:
    import openai

    def agent(task: Task, llm: LLM) -> float:
        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0)
        said = str(task.input)
        for _ in range(3):
            messages: Any = [{"role": "user", "content": said}]
            parts = client.chat.completions.create(model=llm.model, messages=messages, stream=True)
            said += " | " + "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        return 1.0

    parent = made.run(agent)
    found = made.run(agent, parent=parent.key(3))
    assert found.rollout.error == ""
    assert list(found.calls[0].prompt_ids) == list(parent.calls[2].prompt_ids)


def test_a_clock_in_a_prompt_makes_the_branch_void_by_name(made: Brancher) -> None:
    clock = itertools.count(1_790_000_000, 7)

    def agent(task: Task, llm: LLM) -> float:
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(next(clock)))
        first = ask(llm, f"It is {now}. {task.input}")
        return float(len(ask(llm, f"And then? {first}")))

    parent = made.run(agent)
    before = made.sampled
    found = made.run(agent, parent=parent.key(2))
    assert made.sampled == before  # nothing was sampled for it
    assert (found.rollout.status, found.rollout.fault, found.rollout.reward) == (Status.FAILED, Fault.AGENT, None)
    assert "void" in found.rollout.error
    assert "the clock" in found.rollout.error
    assert [call.finish_reason for call in found.calls] == ["branch_void"]


def test_one_that_hides_that_it_is_void_has_no_reward(made: Brancher) -> None:
    marks = itertools.count()

    def agent(task: Task, llm: LLM) -> float:
        for question in (f"attempt {next(marks)}", "second"):
            try:
                ask(llm, question)
            except RuntimeError:
                continue
        return 1.0

    parent = made.run(agent)
    before = made.sampled
    found = made.run(agent, parent=parent.key(2))
    assert made.sampled == before
    assert found.rollout.reward is None
    assert "void" in found.rollout.error


def test_a_state_that_differs_at_the_branching_call_is_void(made: Brancher) -> None:
    weather = itertools.count()

    def agent(task: Task, llm: LLM) -> float:
        first = ask(llm, "one")
        return float(len(ask(llm, f"{first}, weather {next(weather)}")))

    parent = made.run(agent)
    before = made.sampled
    found = made.run(agent, parent=parent.key(2))
    assert made.sampled == before
    assert "void" in found.rollout.error
    assert "weather" in found.rollout.error


def test_of_parallel_calls_with_a_clock_the_one_that_was_meant_is_compared(made: Brancher) -> None:
    def agent(task: Task, llm: LLM) -> float:
        for part in range(3):
            ask(llm, f"It is 14:02:1{part}. Write part {part} of it")
        return 1.0

    calls = made.whole(made.run(agent).rollout.id).calls
    body = {"model": "policy", "messages": [{"role": "user", "content": "It is 15:00:00. Write part 2 of it"}]}
    found = diverged(body, calls[0].caller, "/chat/completions", calls)
    assert found.nearest is not None
    assert found.nearest.number == 3
    assert "the clock" in found.suspect


def test_an_agent_that_leaves_a_call_out_is_void(made: Brancher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch_answers, "PATIENCE", 0.2)
    turns = itertools.count()

    def agent(task: Task, llm: LLM) -> float:
        if next(turns) == 0:
            ask(llm, "aside")
        return float(len(ask(llm, "main")))

    parent = made.run(agent)
    found = made.run(agent, parent=parent.key(2))
    assert "was not asked for again" in found.rollout.error
    assert found.rollout.reward is None


def test_one_that_ends_before_it_branches_has_no_reward(made: Brancher) -> None:
    turns = itertools.count()

    def agent(task: Task, llm: LLM) -> float:
        ask(llm, "first")
        if next(turns) == 0:
            ask(llm, "second")
        return 1.0

    parent = made.run(agent)
    found = made.run(agent, parent=parent.key(2))
    assert (found.rollout.reward, found.rollout.status) == (None, Status.FAILED)
    assert "void: the agent ended without an answer to the call at which it branches" in found.rollout.error


def test_calls_at_the_same_time_are_answered_or_made_anew_by_when_they_were_sent() -> None:
    """Three writers at once, then a joiner: a branch at the joiner has the three from the record; one at a writer has them
    anew, since none of them knew the others."""
    barrier = threading.Barrier(3)

    def agent(task: Task, llm: LLM) -> float:
        def write(part: int) -> str:
            barrier.wait(120)
            return ask(llm, f"part {part}")

        plan = ask(llm, "plan")
        with ThreadPoolExecutor(3) as pool:
            texts = list(pool.map(write, range(3)))
        return float(len(ask(llm, f"{plan}: {' '.join(texts)}")))

    count = itertools.count()

    def script(body: Any) -> Reply:
        together = "part" in body["messages"][0]["content"]
        return Reply(f"said {next(count)}", delay=0.3 if together else 0.0)  # so that the three are under way together

    with brancher(script) as made:
        parent = made.run(agent)
        assert len(parent.calls) == 5
        at_joiner = made.run(agent, parent=parent.key(5))
        assert at_joiner.rollout.error == ""
        assert len(at_joiner.calls) == 1
        at_writer = made.run(agent, parent=parent.key(3))
        assert at_writer.rollout.error == ""
        assert len(at_writer.calls) == 4


def test_tools_of_the_prefix_do_not_run_again(made: Brancher) -> None:
    ran: list[str] = []

    @lightning.tool
    def look(place: str) -> str:
        """Look somewhere."""
        ran.append(place)
        return f"{place} {len(ran)}"

    def agent(task: Task, llm: LLM) -> float:
        seen = look("door")
        first = ask(llm, f"I see {seen}")
        seen = look("window")
        second = ask(llm, f"I see {seen} after {first}")
        look("exit")
        return float(len(second))

    parent = made.run(agent)
    assert ran == ["door", "window", "exit"]
    found = made.run(agent, parent=parent.key(2))
    assert found.rollout.error == ""
    assert ran[3:] == ["exit"]  # what follows the branch runs
    assert [event.name for event in found.attempt.tool_events] == ["look"] * 3


def test_it_is_random_as_its_parent_was() -> None:
    """Seeds are the trainer's: a branch has its parent's."""
    parent = Rollout("run/0/1/2", "run", Task("q"), "run/0/1", attempt=2)
    branch = replace(parent, id="run/0/1/8", index=8, attempt=1, parent=("run/0/1/2", 2, 3))
    elsewhere = replace(branch, id="other/0", run="other", group="other")
    how = HowToCall(seed=3)
    assert how.agent_seed(branch) == how.agent_seed(elsewhere) == how.agent_seed(parent)
    assert how.agent_seed(replace(branch, parent=None)) != how.agent_seed(parent)


def test_an_edited_answer_is_what_the_agent_goes_on_with(made: Brancher) -> None:
    parent = made.run(chain(3))
    before = made.sampled
    found = made.run(chain(3), parent=parent.key(2), config={"branch": {"edit": "another word"}})
    assert found.rollout.error == ""
    assert made.sampled - before == 1
    assert "another word" in made.house.fake.requests[-1].body["messages"][0]["content"]


def test_the_last_answer_may_be_an_edited_one(made: Brancher) -> None:
    parent = made.run(chain(2))
    before = made.sampled
    found = made.run(chain(2), parent=parent.key(2), config={"branch": {"edit": "said 77"}})
    assert (found.rollout.error, found.rollout.reward) == ("", 77.0)
    assert made.sampled == before
    assert not found.calls


def test_an_edit_that_was_never_asked_for_is_no_success(made: Brancher) -> None:
    turns = itertools.count()

    def agent(task: Task, llm: LLM) -> float:
        said = ask(llm, "first")
        return float(len(said if next(turns) else ask(llm, "second")))

    parent = made.run(agent)
    found = made.run(agent, parent=parent.key(2), config={"branch": {"edit": "another word"}})
    assert found.rollout.reward is None
    assert "the agent ended without an answer to the call" in found.rollout.error


def test_a_changed_prompt_is_no_divergence_where_it_is_meant(made: Brancher) -> None:
    style = ["plain"]

    def agent(task: Task, llm: LLM) -> float:
        first = ask(llm, "one")
        return float(len(ask(llm, f"{style[0]}: {first}")))

    parent = made.run(agent)
    style[0] = "in rhymes"
    found = made.run(agent, parent=parent.key(2), config={"branch": {"prompts": True}})
    assert found.rollout.error == ""
    assert len(found.calls) == 1


def test_a_branch_of_a_branch_is_refused(made: Brancher) -> None:
    parent = made.run(chain(3))
    branch = made.run(chain(3), parent=parent.key(2))
    found = made.run(chain(3), parent=branch.key(1))
    assert "is a branch of" in found.rollout.error
    assert found.rollout.reward is None


@pytest.mark.parametrize("seq", [-1, 2, 99])
def test_a_call_that_is_not_there_is_refused(made: Brancher, seq: int) -> None:
    parent = made.run(chain(2))
    found = made.run(chain(2), parent=(parent.rollout.id, 1, seq))
    assert "has no answered call" in found.rollout.error
    assert found.rollout.reward is None


def test_a_rollout_with_a_credential_in_its_record_is_refused(made: Brancher) -> None:
    key = "sk-proj-" + "a1B2c3D4e5F6g7H8" * 3

    def agent(task: Task, llm: LLM) -> float:
        return float(len(ask(llm, f"my key is {key}") + ask(llm, "next")))

    parent = made.run(agent)
    found = made.run(agent, parent=parent.key(2))
    assert "a credential was left out" in found.rollout.error


def test_responses_go_on_with_what_their_parent_was_answered() -> None:
    import openai

    def agent(task: Task, llm: LLM) -> float:
        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0)
        reply = client.responses.create(model=llm.model, input=str(task.input))
        for question in ("more", "and more"):
            reply = client.responses.create(model=llm.model, input=question, previous_response_id=reply.id)
        return float(len(reply.output_text))

    with brancher(numbered()) as made:
        parent = made.run(agent)
        assert parent.rollout.error == ""
        found = made.run(agent, parent=parent.key(2))
        assert found.rollout.error == ""
        assert list(found.calls[0].prompt_ids) == list(parent.calls[1].prompt_ids)
        assert len(found.calls) == 2


def stored(calls: Sequence[Transition]) -> int:
    """The bytes of what was said."""
    return sum(len(exchanges.packed_in(call) or b"") for call in calls)


def talk(turns: int, *names: str) -> Callable[[Task, LLM], float]:
    """Agents that take turns, each with a conversation of its own that goes on."""

    def agent(task: Task, llm: LLM) -> float:
        talks: dict[str, list[Any]] = {
            name: [{"role": "system", "content": f"You are {name}. " * 20}] for name in names
        }
        headers = {"authorization": f"Bearer {llm.api_key}"}
        for turn in range(turns):
            for messages in talks.values():
                messages.append({"role": "user", "content": f"{task.input}, step {turn}?"})
                body = {"model": llm.model, "messages": messages}
                reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers, timeout=60)
                messages.append(reply.raise_for_status().json()["choices"][0]["message"])
        return 1.0

    return agent


@pytest.mark.parametrize("agent", [talk(6, "alone"), talk(2, "red", "green", "blue"), talk(2, *"abcdef")])
def test_no_more_is_stored_than_its_own_calls(agent: Callable[[Task, LLM], float]) -> None:
    """A branch takes no more bytes than the same calls took of its parent: what comes before them is not stored again."""
    saying = (hashlib.md5(bytes([n])).hexdigest() for n in range(200))  # texts of one length
    with brancher(lambda body: Reply(next(saying))) as made:
        parent = made.run(agent)
        assert parent.rollout.error == ""
        asked = exchanges.read(parent.calls)
        for number, theirs in enumerate(asked):
            found = made.run(agent, parent=parent.key(number + 1))
            assert found.rollout.error == ""
            assert len(found.calls) == len(parent.calls) - number
            told = sum(exchanges.flags_of(call) == exchanges.Flag.OF_PARENT for call in found.calls)
            assert told >= 1
            # A call that is told against the parent costs 4 bytes for its check, and what a few random ids make of compressed
            # bytes. Where agents take turns, the first call of each one is.
            assert stored(found.calls) <= stored(parent.calls[number:]) + 8 * told
            assert not any(exchanges.flags_of(call) & ~exchanges.Flag.OF_PARENT for call in found.calls)
            first = exchanges.read(found.calls, Parent(parent.rollout.id, parent.calls))[0]
            assert first is not None
            assert theirs is not None
            assert first.request == theirs.request


def test_a_branch_whose_parent_is_gone_says_so(made: Brancher) -> None:
    parent = made.run(chain(3))
    found = made.run(chain(3), parent=parent.key(2))
    assert made.whole(found.rollout.id).calls[1].exchange.request
    with pytest.raises(StoreError, match=f"of its parent {parent.rollout.id}, whose calls are not in the store"):
        recorded_rollout(found.rollout, found.calls, parent=Parent(parent.rollout.id))


def test_a_branch_that_only_did_what_runs_beside_it_is_void() -> None:
    """A watcher asks at the same time as the worker; in the branch the worker gives up before its call."""
    turns = itertools.count()
    barrier = threading.Barrier(2)

    def agent(task: Task, llm: LLM) -> float:
        first = next(turns) == 0
        plan = ask(llm, "plan")

        def work() -> None:
            barrier.wait(120)
            if first:
                ask(llm, f"work on {plan}")

        def watch() -> None:
            barrier.wait(120)
            ask(llm, f"watch {plan}")

        with ThreadPoolExecutor(2) as pool:
            for done in (pool.submit(work), pool.submit(watch)):
                done.result()
        return 1.0

    with brancher(lambda body: Reply("x", delay=0.3 if body["messages"][0]["content"] != "plan" else 0.0)) as made:
        parent = made.run(agent)
        worker = next(
            call for call in parent.calls if list(call.prompt_ids) == _prompt(parent.calls, made, "work on x")
        )
        found = made.run(agent, parent=worker.key)
    assert [call.status for call in found.calls] == [CallStatus.OK]
    assert found.rollout.reward is None
    assert "without an answer to the call at which it branches" in found.rollout.error


def _prompt(calls: Any, made: Brancher, content: str) -> list[int]:
    """The ids of the prompt with this content."""
    bodies = [each.body for each in made.house.fake.requests]
    place = next(n for n, body in enumerate(bodies) if body["messages"][0]["content"] == content)
    return list(calls[sorted(range(len(calls)), key=lambda n: calls[n].started_at)[place]].prompt_ids)


def test_one_whose_agent_lost_patience_at_the_branching_call_is_void() -> None:
    turns = itertools.count()

    def agent(task: Task, llm: LLM) -> float:
        first = ask(llm, "one")
        patience = 60.0 if next(turns) == 0 else 0.1
        body = {"model": llm.model, "messages": [{"role": "user", "content": f"two {first}"}]}
        with contextlib.suppress(httpx.TimeoutException):
            headers = {"authorization": f"Bearer {llm.api_key}"}
            httpx.post(f"{llm.base_url}/chat/completions", json=body, headers=headers, timeout=patience)
        return float(len(ask(llm, "three")))

    with brancher(lambda body: Reply("x", delay=0.5 if "two" in body["messages"][0]["content"] else 0.0)) as made:
        parent = made.run(agent)
        assert parent.rollout.error == ""
        found = made.run(agent, parent=parent.key(2))
    assert found.rollout.reward is None
    assert "without an answer to the call at which it branches" in found.rollout.error


@pytest.mark.parametrize("stream", [False, True])
def test_another_chat_template_makes_branches_void(
    made: Brancher, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The request is the same, and the policy server reads other tokens in it."""
    import openai

    def agent(task: Task, llm: LLM) -> float:
        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0)
        said = str(task.input)
        for _ in range(2):
            messages: Any = [{"role": "user", "content": said}]
            if stream:
                parts = client.chat.completions.create(model=llm.model, messages=messages, stream=True)
                said += "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            else:
                said += str(
                    client.chat.completions.create(model=llm.model, messages=messages).choices[0].message.content
                )
        return 1.0

    parent = made.run(agent)
    assert parent.rollout.error == ""
    ordinary = vllm_replies.ChatShape.prompts
    monkeypatch.setattr(
        vllm_replies.ChatShape, "prompts", lambda shape, body: [[7, *ids] for ids in ordinary(shape, body)]
    )
    found = made.run(agent, parent=parent.key(2))
    assert found.rollout.reward is None
    assert "other tokens than were recorded, from token 0 on" in found.rollout.error
    assert not any(call.status.answered for call in found.calls)


def test_a_stream_that_is_too_long_to_be_shown_at_once_is_told_so(
    made: Brancher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the policy of the run answers, the agent sees nothing before it is known which version has answered."""
    import openai

    def agent(task: Task, llm: LLM) -> float:
        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0)
        messages: Any = [{"role": "user", "content": str(task.input)}]
        list(client.chat.completions.create(model=llm.model, messages=messages, stream=True))
        return 1.0

    parent = made.run(agent)
    monkeypatch.setattr(BranchedAttempt, "is_live", True)
    monkeypatch.setattr(gateway_call, "LONGEST_EVENT", 100)
    found = made.run(agent, parent=parent.key(1))
    assert (
        "it sent more than 100 bytes, and a branch is shown all at once: let the agent ask for fewer"
        in found.rollout.error
    )


def test_a_client_that_asks_again_for_a_recorded_answer_gets_it(made: Brancher) -> None:
    def agent(task: Task, llm: LLM) -> float:
        first = ask(llm, "one")
        if llm.extras.get("branches"):
            assert ask(llm, "one") == first
        return float(len(ask(llm, f"two {first}")))

    parent = made.run(agent)
    found = made.run(agent, parent=parent.key(2))
    assert found.rollout.error == ""
    assert len(found.calls) == 1


def test_an_agents_own_seed_is_another_one_in_each_branch(made: Brancher) -> None:
    """Else each would be answered what its parent was."""

    def agent(task: Task, llm: LLM) -> float:
        first = ask(llm, "one", seed=7)
        return float(len(ask(llm, f"two {first}", seed=7)))

    parent = made.run(agent)
    for _ in range(3):
        assert made.run(agent, parent=parent.key(2)).rollout.error == ""
    seeds = [each.body["seed"] for each in made.house.fake.requests]
    assert seeds[:2] == [7, 7]
    assert len(set(seeds)) == 4


def test_what_a_branch_kept_of_its_parent_is_gone_once_it_has_begun(made: Brancher) -> None:
    parent = made.run(chain(6))
    made.run(chain(6), parent=parent.key(5))
    gateway: Any = made.house._gateway
    (branch,) = _branches(gateway)._known.values()
    assert branch.prefix.answered == branch.prefix.beside == ()
    assert not branch._given
    assert not branch._calls._left


def _branches(gateway: Any) -> Branches:
    stage = gateway.parts.line.named("branches")
    assert isinstance(stage, BranchesStage)
    return stage.branches


def test_another_server_goes_on_with_a_branch_that_has_begun(made: Brancher) -> None:
    """As after a restart: what the attempt has recorded says how far it is."""
    forgotten: list[int] = []

    def agent(task: Task, llm: LLM) -> float:
        said = str(task.input)
        for number in range(4):
            said += f" | {ask(llm, said)}"
            if llm.extras.get("branches") and number == 2:
                _branches(made.house._gateway)._known.clear()
                forgotten.append(number)
        return 1.0

    parent = made.run(agent)
    found = made.run(agent, parent=parent.key(3))
    assert forgotten
    assert found.rollout.error == ""
    assert len(found.calls) == 2

"""Conversations of a served model, and what people say of them."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from lightning.types import LLM, Scope, Status
from lightning_record.feedback import feedback_key
from lightning_server.auth import Authenticator, issue_token
from lightning_server.serving import Sessions, admins
from lightning_server.tokens import put_token

ASK = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
CONVERSATION = "X-Lightning-Conversation"


async def opened(house, name: str = "shell", project: str = "default") -> LLM:
    return await Sessions(house.store, house.gateway, {})(name, 3600, project=project, many=True)


async def ask(http: httpx.AsyncClient, conversation: str = "", **more: object) -> str:
    headers = {CONVERSATION: conversation} if conversation else {}
    reply = await http.post("/chat/completions", json=ASK | more, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


async def rate(http: httpx.AsyncClient, response: object, reward: object = 1.0, **more: object) -> httpx.Response:
    return await http.post("/feedback", json={"response_id": response, "reward": reward, **more})


async def served(house) -> list:
    runs = [run for run in await house.store.list_runs() if run.name == "shell"]
    found = [(await house.store.list_rollouts(run.id)).items for run in runs]
    return [rollout for rollouts in found for rollout in rollouts if not rollout.id.endswith("/0")]


async def test_each_conversation_is_a_rollout_that_its_feedback_completes(house) -> None:
    http = await house.http(await opened(house))
    alone, first, second = await ask(http), await ask(http, "c"), await ask(http, "c")
    assert len({alone, first, second}) == 3
    rollouts = {rollout.id: rollout for rollout in await served(house)}
    assert len(rollouts) == 2
    assert all(rollout.status is Status.RUNNING and rollout.split == "serve" for rollout in rollouts.values())
    answer = await rate(http, second, 0.5, note="nearly")
    assert answer.status_code == 200, answer.text
    said = answer.json()
    rated = await house.store.get_rollout(said["rollout"])
    assert (rated.status, rated.reward) == (Status.SUCCEEDED, 0.5)
    assert [call.id for call in await house.store.transitions(rated.id)] == [first, second]
    assert rated.task.input == {"messages": ASK["messages"]}
    kept = await house.store.get_state(rated.run, feedback_key(rated.id))
    assert (kept["note"], kept["response_id"]) == ("nearly", second)
    again = await ask(http, "c")
    assert again not in (first, second)
    assert len(await served(house)) == 3, "a name that was rated begins another conversation"


async def test_what_a_client_said_of_its_calls_is_in_the_rated_conversation(house) -> None:
    http = await house.http(await opened(house))
    http.headers[CONVERSATION] = "c"
    marked = {"x-lightning-untrained": "title"}
    assert (await http.post("/chat/completions", json=ASK, headers=marked)).status_code == 200
    rejected = await ask(http)
    last = await http.post("/chat/completions", json=ASK, headers={"x-lightning-rejected": rejected})
    rated = (await rate(http, last.json()["id"])).json()["rollout"]
    assert [call.untrained for call in await house.store.transitions(rated)] == ["title", "rejected", ""]


async def test_a_rejection_outside_of_a_named_conversation_is_said(house, caplog) -> None:
    http = await house.http(await opened(house))
    rejected = await ask(http)
    last = await http.post("/chat/completions", json=ASK, headers={"x-lightning-rejected": rejected})
    assert (await rate(http, last.json()["id"])).status_code == 200
    assert f"a rejection named 1 responses that are not recorded, such as '{rejected}': a call can be" in caplog.text
    assert "send the header X-Lightning-Conversation with each call" in caplog.text


async def test_a_stream_is_rated_by_the_id_of_its_chunks(house) -> None:
    http = await house.http(await opened(house))
    reply = await http.post("/chat/completions", json=ASK | {"stream": True})
    assert (await rate(http, reply.headers["x-request-id"])).status_code == 200
    assert reply.headers["x-request-id"] in reply.text


async def test_a_second_feedback_is_the_first_one_s_answer_or_refused(house) -> None:
    http = await house.http(await opened(house))
    one, other = await ask(http, "c"), await ask(http, "c")
    first = await rate(http, one, 1, note="good")
    assert (await rate(http, one, 1.0, note="good")).json() == first.json()
    for response, reward, note in ((one, 0.0, "good"), (one, 1.0, ""), (other, 1.0, "good")):
        refused = await rate(http, response, reward, note=note)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "already_rated")
    assert (await served(house))[0].reward == 1.0


async def test_unknown_and_foreign_responses_are_refused_in_the_same_words(house) -> None:
    mine, theirs = await house.http(await opened(house)), await house.http(await opened(house))
    known = await ask(theirs)
    forged = known[:-1] + ("0" if known[-1] != "0" else "1")
    answers = [await rate(mine, response) for response in (known, "chatcmpl-unknown", forged, forged[:-9])]
    answers += [await rate(theirs, forged)]
    assert {(answer.status_code, answer.text) for answer in answers} == {(404, answers[0].text)}
    assert "made with this key" in answers[0].text
    assert (await rate(theirs, known)).status_code == 200


async def test_admins_rate_what_is_of_their_projects(house) -> None:
    house.gateway.parts.admin_of = admins(Authenticator(house.store))
    keys = {project: await house.http(await opened(house, project=project)) for project in ("default", "other")}
    responses = {project: await ask(http) for project, http in keys.items()}

    async def status(project: str, response: str, scope: Scope = Scope.ADMIN) -> int:
        token, plain = issue_token(scope, project)
        await put_token(house.store, token)
        headers = {"authorization": f"Bearer {plain}"}
        async with httpx.AsyncClient(base_url=f"{house.gateway.url}/v1", headers=headers) as http:
            return (await rate(http, response)).status_code

    assert await status("other", responses["default"]) == 404
    assert await status("other", responses["other"], Scope.VIEWER) == 403
    assert await status("other", responses["other"]) == 200
    assert await status("*", responses["default"]) == 200


async def test_an_agent_that_is_trained_cannot_rate_itself(house) -> None:
    http = await house.http()
    response = await ask(http)
    refused = await rate(http, response)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "feedback_not_allowed")
    assert (await house.store.get_rollout(house.leases[0].rollout.id)).status is Status.RUNNING
    nobody = await house.http(LLM(f"{house.gateway.url}/v1", "nonsense", "policy"))
    assert (await rate(nobody, response)).status_code == 401


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"reward": 1}, "response_id"),
        ({"response_id": 7, "reward": 1}, "response_id"),
        ({"response_id": "a"}, "reward"),
        ({"response_id": "a", "reward": True}, "reward"),
        ({"response_id": "a", "reward": "1"}, "reward"),
        ({"response_id": "a", "reward": 10**400}, "reward"),
        ({"response_id": "a", "reward": 1, "note": 3}, "note"),
        ({"response_id": "a", "reward": 1, "note": "x" * 5000}, "note"),
        ({"response_id": "a", "reward": 1, "thumbs": "up"}, "thumbs"),
        ({"response_id": "a", "reward": 1, "x" * 1_000_000: 1}, "x" * 200 + "…"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
async def test_what_is_no_feedback_names_the_field(house, sent: dict[str, object], field: str) -> None:
    http = await house.http(await opened(house))
    text = json.dumps(sent)
    refused = await http.post("/feedback", content=text)
    assert refused.status_code == 400, refused.text
    assert len(refused.content) < 25_000, "a name in a request is told, and not repeated whole"
    if sent.get("reward") != 10**400:  # JSON of numbers beyond 64 bits is refused whole
        assert refused.json()["error"]["param"] == field


async def test_responses_go_on_in_their_conversation_until_it_is_rated(house) -> None:
    http = await house.http(await opened(house))
    first = (await http.post("/responses", json={"model": "policy", "input": "Hello"})).json()["id"]
    more = {"model": "policy", "input": "And?", "previous_response_id": first}
    second = (await http.post("/responses", json=more)).json()["id"]
    (rollout,) = await served(house)
    assert [call.id for call in await house.store.transitions(rollout.id)] == [first, second]
    assert (await rate(http, second)).status_code == 200
    refused = await http.post("/responses", json=more | {"previous_response_id": second})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conversation_over")


async def test_conversations_are_found_again_by_another_gateway(build) -> None:
    house = await build()
    llm = await opened(house)
    response = await ask(await house.http(llm), "c")
    other = await build(store=house.store)
    http = await other.http(LLM(f"{other.gateway.url}/v1", llm.api_key, "policy"))
    await ask(http, "c")
    assert (await rate(http, response)).status_code == 200
    (rollout,) = await served(house)
    assert len(await house.store.transitions(rollout.id)) == 2


async def test_many_conversations_at_once_are_many_rollouts(house) -> None:
    http = await house.http(await opened(house))
    names = [f"c{number % 5}" for number in range(40)] + [""] * 20
    ids = await asyncio.gather(*(ask(http, name) for name in names))
    assert len(set(ids)) == 60
    rollouts = await served(house)
    assert sorted([len(await house.store.transitions(rollout.id)) for rollout in rollouts]) == [1] * 20 + [8] * 5


async def test_without_recorded_requests_a_task_is_a_digest(build) -> None:
    house = await build(record_requests=False)
    http = await house.http(await opened(house))
    await ask(http)
    (rollout,) = await served(house)
    assert list(rollout.task.input) == ["sha256"]

"""Several processes on one database: nothing acknowledged is lost by `kill -9`, and no rollout is leased twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter

import pytest
from lightning.plugins import plugins
from lightning.types import Outcome, Rollout, Run, Status, Task

APPEND = """
    import asyncio, os, sys
    from lightning.plugins import plugins
    from lightning.types import Rollout, Task, Transition, logprobs, token_ids

    async def main(url):
        store = plugins().store(url)
        await store.open()
        names = [f"r{i}" for i in range(8)]
        await store.create_rollouts([Rollout(name, "run", Task("q"), "g") for name in names])
        await store.lease("run", "w", limit=8, ttl=3600)

        async def agent(name):
            prompt = list(range(500))
            for seq in range(100_000):
                answer = [seq, hash(name) % 1000] * 20
                await store.append([Transition(name, 1, seq, "c", token_ids(prompt), token_ids(answer), logprobs([-1.0] * 40))])
                os.write(1, f"{name} {seq}\\n".encode())
                prompt = prompt[:500] + answer

        await asyncio.gather(*(agent(name) for name in names))

    asyncio.run(main(sys.argv[1]))
"""
WORK = """
    import asyncio, random, sys
    from lightning.plugins import plugins
    from lightning.types import Outcome

    async def main(url, worker):
        store = plugins().store(url)
        await store.open()
        rng = random.Random(worker)
        while held := await store.lease("run", worker, limit=rng.randint(1, 4), ttl=3600):
            for lease in held:
                print("leased", lease.rollout.id, lease.attempt)
                if rng.random() < 0.2:
                    continue  # never finished: taken back at the end
                await store.complete(lease.rollout.id, lease.attempt, Outcome(reward=1.0))
                print("done", lease.rollout.id, lease.attempt)
        await store.close()

    asyncio.run(main(*sys.argv[1:]))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is POSIX")
@pytest.mark.parametrize("after", [1, 60, 400])
async def test_what_was_acknowledged_survives_kill_9(store_url: str, after: int) -> None:
    process = start(APPEND, store_url)
    assert process.stdout is not None
    assert process.stderr is not None
    lines = [process.stdout.readline() for _ in range(after)]
    os.kill(process.pid, signal.SIGKILL)
    lines += process.stdout.readlines()
    assert process.wait(120) == -signal.SIGKILL, process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    acknowledged = {(name, int(seq)) for name, seq in (line.split() for line in lines if line.endswith("\n"))}
    assert len(acknowledged) >= after
    store = plugins().store(store_url)
    await store.open()
    stored = await store.transitions_of([(f"r{i}", 1) for i in range(8)])
    assert acknowledged <= {(t.rollout, t.seq) for calls in stored for t in calls}
    for calls in stored:
        assert [t.seq for t in calls] == list(range(len(calls)))
    assert (await store.complete("r0", 1, Outcome(reward=1.0))).status is Status.SUCCEEDED
    await store.close()


@pytest.mark.slow
async def test_many_processes_never_hold_one_attempt_twice(store_url: str) -> None:
    store = plugins().store(store_url)
    await store.open()
    await store.put_run(Run("run", "run"))
    names = [f"r{i}" for i in range(150)]
    await store.create_rollouts([Rollout(name, "run", Task("q"), "g") for name in names])
    workers = [start(WORK, store_url, f"w{i}") for i in range(4)]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4, outputs
    events = [tuple(line.split()) for out, _ in outputs for line in out.splitlines()]
    leased = Counter((name, attempt) for event, name, attempt in events if event == "leased")
    assert set(leased) == {(name, "1") for name in names}
    assert set(leased.values()) == {1}
    done = {name for event, name, _ in events if event == "done"}
    unfinished = sum([await store.release(f"w{i}") for i in range(4)])
    assert unfinished == len(names) - len(done)
    rollouts = (await store.list_rollouts("run")).items
    assert {r.id for r in rollouts if r.status is Status.SUCCEEDED} == done
    assert {r.id for r in rollouts if r.status is Status.PENDING} == set(names) - done
    await store.close()


EXPIRE = """
    import asyncio, random, sys
    from lightning.errors import StaleAttemptError
    from lightning.plugins import plugins
    from lightning.types import Outcome, Status, Transition, logprobs, token_ids

    async def main(url, name):
        store = plugins().store(url)
        await store.open()
        rng = random.Random(name)

        async def work(worker):
            while (await store.list_rollouts("run", status=Status.PENDING, limit=1)).items or rng.random() < 0.97:
                for lease in await store.lease("run", worker, limit=rng.randint(1, 3), ttl=rng.choice((0, 0.02, 5))):
                    key = (lease.rollout.id, lease.attempt)
                    print("leased", *key)
                    call = Transition(*key, 0, "c", token_ids([1] * lease.attempt), token_ids([2]), logprobs([-1.0]))
                    try:
                        await store.append([call])
                        await asyncio.sleep(rng.random() * 0.02)
                        await store.renew(lease, ttl=5)
                        await store.complete(*key, Outcome(reward=float(lease.attempt)))
                        print("done", *key)
                    except StaleAttemptError:
                        print("late", *key)

        await asyncio.gather(*(work(f"{name}-{i}") for i in range(4)))
        await store.close()

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
async def test_leases_that_expire_under_everybodys_hands_end_once(store_url: str) -> None:
    """Leases of no length, taken over at once by many: every attempt has one holder, and one attempt of a rollout ends it."""
    store = plugins().store(store_url)
    await store.open()
    await store.put_run(Run("run", "run"))
    names = [f"r{i}" for i in range(30)]
    await store.create_rollouts([Rollout(name, "run", Task("q"), "g", max_attempts=40) for name in names])
    workers = [start(EXPIRE, store_url, f"w{i}") for i in range(3)]
    outputs = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 3, outputs
    events = Counter(tuple(line.split()) for out, _ in outputs for line in out.splitlines())
    assert set(events.values()) == {1}
    done = {name: int(attempt) for event, name, attempt in events if event == "done"}
    assert len(done) == sum(event == "done" for event, _, _ in events)
    assert any(event == "late" for event, _, _ in events)
    for rollout in (await store.list_rollouts("run")).items:
        leased = sorted(int(attempt) for event, name, attempt in events if event == "leased" and name == rollout.id)
        assert leased == list(range(1, rollout.attempt + 1))
        assert (rollout.status is Status.SUCCEEDED) == (rollout.id in done)
        if rollout.id in done:
            assert (rollout.attempt, rollout.reward) == (done[rollout.id], float(rollout.attempt))
            assert [t.attempt for t in await store.transitions(rollout.id)] == [rollout.attempt]
    await store.close()

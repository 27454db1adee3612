"""Operations that a stranger's plugin brings with scripts of its own to Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.errors import StoreError
from lightning_redis.store import RedisStore

from tests.plugins.server.strangers import check_answers, check_projects

REDIS = '''
import json

from lab_NAME import Verdict
from lightning.store.rollout_state import known_as
from lightning_redis import lua_scripts
from lightning_redis.loop_client import done

PUT = lua_scripts.script("put_verdict", """
-- keys: verdicts every once
-- arguments: text name seconds

local before = recalled() or recalled_as(name, once)
if before then return before end
redis.call('RPUSH', every, text)
return remember_as(name, once, seconds, {'ok', redis.call('RPUSH', verdicts, text)})
""")


async def put(link, rollout, verdict, once):
    text = json.dumps([rollout, verdict.judge, verdict.text])
    keys = [link.keys("NAME", rollout), link.keys("NAME")]
    (count,) = done(await link.run_once(PUT, keys, known_as(once, "put_verdict", text), text))
    return int(count)


async def read(link, rollout):
    (found,) = await link.reads.read((b"LRANGE", link.keys("NAME", rollout), b"0", b"-1"))
    return [Verdict(*json.loads(text)) for text in found]


async def judges(link, text):
    (found,) = await link.reads.read((b"LRANGE", link.keys("NAME"), b"0", b"-1"))
    return sorted({said[1] for said in map(json.loads, found) if said[2] == text})


FUNCTIONS = {"put_verdict": put, "verdicts": read, "judges": judges}
'''


@pytest.mark.parametrize("check", [check_answers, check_projects])
async def test_a_strangers_scripts_do_its_operations(
    lab: Callable[..., Any], make_redis: Callable[[], RedisStore], check: Callable[..., Any]
) -> None:
    here, store = lab(redis=REDIS), make_redis()
    await store.open()
    await check(here, store)
    await store.close()


async def test_a_part_without_a_function_says_so(lab: Callable[..., Any], make_redis: Callable[[], RedisStore]) -> None:
    here, store = lab(redis="FUNCTIONS = {}"), make_redis()
    await store.open()
    with pytest.raises(
        StoreError, match=r"cannot do verdicts: .* 'verdicts' has no function for it here. Install another"
    ):
        await here.verdicts(store, "a")
    await store.close()

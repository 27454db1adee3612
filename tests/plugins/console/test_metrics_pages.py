"""Any metric of a run, a user's own included, can be drawn, several at once, by an address that can be shared."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import pytest
from lightning.store.memory import MemoryStore
from lightning.trainer.context import mark_over
from lightning.types import Run, StepRecord
from lightning_console.answers import answer
from lightning_console.export import links_of
from lightning_console.pages.metrics import MOST, choosing, chosen, toggled
from lightning_console.places import Places
from lightning_console.router import Address, show

from tests.plugins.console.reading import places_of, shown, texts

OWN = "mine/a,b & c%"
"""A metric of a stage of the user's own, with all that is special in addresses."""


@pytest.fixture
async def places() -> AsyncIterator[Places]:
    store = MemoryStore()
    await store.open()
    await store.put_run(Run("run", "run", {"model": "m"}))
    await store.log_metrics("run", 0, {"eval/reward": 0.25})
    for step in range(1, 5):
        own = {OWN: math.nan if step == 2 else step / 10, "grad_norm": 1.0 + step, "reward_with_failures": 0.1 * step}
        await store.commit_step(StepRecord("run", step, step, (), (), f"d{step}", metrics=own))
        await store.log_metrics("run", step, {"probe_gap": 0.5})
    await store.log_metrics("run", 4, {"eval/reward": 0.75})
    await store.put_run(Run("empty", "empty", {}))
    yield places_of(store)
    await store.close()


def test_a_choice_of_charts_is_in_the_address_whatever_the_names_are() -> None:
    address = choosing(Address("run", ("r",), {"profile": "yes"}), [OWN, "grad_norm"])
    again = Address.parse(str(address))
    assert chosen(again) == [OWN, "grad_norm"]
    assert again.option("profile") == "yes"
    assert chosen(toggled(again, OWN)) == ["grad_norm"]
    assert toggled(toggled(again, OWN), "grad_norm").options == {"profile": "yes"}
    assert len(chosen(choosing(address, [str(number) for number in range(99)]))) == MOST


@pytest.mark.parametrize("page", ["run", "metrics"])
async def test_chosen_metrics_are_drawn_on_the_pages_of_the_run(places: Places, page: str) -> None:
    address = choosing(Address(page, ("run",)), [OWN, "probe_gap", "grad_nrom"])
    found = await shown(places, str(address))
    assert found[OWN]["series"][0]["points"] == [[1, 0.1], [2, None], [3, 0.3], [4, 0.4]]
    assert found[OWN]["series"][0]["to"][0] == "step/run/1"
    assert [point[1] for point in found["probe_gap"]["series"][0]["points"]] == [0.5] * 4
    json = (await show(places, str(address))).to_json()
    notices = [
        each for block in json["blocks"] if block["component"] == "Notices" for each in block["value"]["notices"]
    ]
    assert ("no step of this run has the metric 'grad_nrom'", "did you mean grad_norm?") in {
        (each["text"], each["detail"]) for each in notices
    }
    (controls,) = [block["value"]["controls"] for block in json["blocks"] if block["component"] == "Controls"]
    choices = {label: value for value, label in controls[-1]["choices"]}
    assert chosen(Address("run", options={"chart": choices["grad_norm"]}))[-1] == "grad_norm"
    assert OWN not in chosen(Address("run", options={"chart": choices[f"take away {OWN}"]}))


async def test_all_metrics_stand_in_a_table_and_what_was_logged_before_the_first_step_too(places: Places) -> None:
    found = await shown(places, "metrics/run?chart=eval/reward&over=time")
    rows = {row["metric"]: row for row in texts(found["All metrics"])}
    assert rows.keys() == {OWN, "grad_norm", "reward_with_failures", "probe_gap", "✓ eval/reward"}
    assert (rows["✓ eval/reward"]["first"], rows["✓ eval/reward"]["last"]) == ("0.25", "0.75")
    assert (rows[OWN]["least"], rows[OWN]["most"]) == ("0.1", "0.4")
    drawn = found["eval/reward"]
    assert drawn["series"][0]["points"][0] == [0.0, 0.25]
    assert drawn["series"][0]["to"][0] == "", "there is no page of a step 0"
    assert drawn["x"] == "wall time (s)"


async def test_it_is_linked_from_the_run_and_told_to_programs(places: Places) -> None:
    assert "metrics/run" in set(links_of((await show(places, "run/run")).to_json()))
    told = await answer(places, "run/run?chart=grad_norm", "grad_norm")
    assert told["blocks"][0]["series"][0]["points"][0] == [1, 2.0]


@pytest.mark.parametrize("page", ["run/run", "metrics/run"])
async def test_pages_of_a_run_that_goes_on_are_asked_for_again(places: Places, page: str) -> None:
    (store,) = (await places.stores()).values()
    for over in (True, False):
        await mark_over(store, "run", over)
        assert (await show(places, page)).live is not over


async def test_a_run_without_a_step_says_so(places: Places) -> None:
    found = await shown(places, "metrics/empty?chart=reward")
    assert found["All metrics"]["empty"] == "no step is committed yet"
    assert "'reward'" in found["Notices"]["notices"][0]["text"]

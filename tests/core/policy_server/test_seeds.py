"""A call with a seed whose prompt was cut into parts, against a stand-in for vLLM's model runner and real generators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.policy_server.worker import keep_seeds


class Runner:
    """As vLLM's: it draws for every row, and turns back those whose token is thrown away by CUDA's means."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.input_batch = SimpleNamespace(generators={row: torch.Generator().manual_seed(row) for row in (0, 2)})
        self.discard_request_mask = SimpleNamespace(np=np.zeros(4, dtype=bool))

    def _sample(self, logits: object, metadata: object) -> list[float]:
        assert (logits, metadata) == ("logits", None)
        return [float(torch.rand((), generator=one)) for one in self.input_batch.generators.values()]

    def _bookkeeping_sync(self, output: list[float], *, spec: object) -> list[float]:
        assert spec is None
        for row in np.nonzero(self.discard_request_mask.np)[0]:
            if (one := self.input_batch.generators.get(int(row))) is not None:
                one.set_offset(one.get_offset() - 4)
        return output

    def step(self, *thrown_away: int) -> list[float]:
        self.discard_request_mask.np[:] = False
        self.discard_request_mask.np[list(thrown_away)] = True
        return self._bookkeeping_sync(self._sample("logits", None), spec=None)


def test_what_is_thrown_away_was_not_drawn() -> None:
    straight, cut = Runner(), Runner()
    keep_seeds(cut)
    whole = [straight.step() for _ in range(2)]
    assert cut.step(0, 1, 2) == whole[0]
    assert cut.step(0) == whole[0]
    third = cut.step()
    assert third == [whole[0][0], whole[1][1]]
    assert sorted(cut.input_batch.generators) == [0, 2]


def test_a_bookkeeping_that_fails_leaves_the_generators() -> None:
    runner = Runner()
    runner._bookkeeping_sync = lambda output: 1 / 0  # type: ignore[assignment,method-assign]
    keep_seeds(runner)
    with pytest.raises(ZeroDivisionError):
        runner._bookkeeping_sync([])  # type: ignore[call-arg]
    assert sorted(runner.input_batch.generators) == [0, 2]


def test_other_devices_and_other_runners_are_left_alone() -> None:
    cuda: Any = Runner("cuda")
    keep_seeds(cuda)
    assert "_sample" not in vars(cuda)
    other = SimpleNamespace(device=torch.device("cpu"))
    keep_seeds(other)
    assert vars(other) == {"device": torch.device("cpu")}

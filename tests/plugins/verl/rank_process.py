"""One rank of a job in a process of its own, without Ray: `python rank_process.py SOCKET RANK` does what it is sent there."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client
from typing import Any


def stand_in_for_flash_attention() -> None:
    """Let models compute with `flash_attention_2` on a CPU, with its results: each packed row by itself, causally."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from transformers import PreTrainedModel
    from verl.models.transformers import monkey_patch

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, position_ids: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        row = (position_ids.reshape(-1) == 0).cumsum(0)
        seen = (row[:, None] == row) & torch.ones(len(row), len(row), dtype=torch.bool).tril()
        states = (each.transpose(1, 2) for each in (query, key, value))
        found = scaled_dot_product_attention(*states, seen, scale=more["softmax_scale"], enable_gqa=True)
        return found.transpose(1, 2)

    PreTrainedModel._check_and_adjust_attn_implementation = lambda _, chosen, *__, **___: chosen or "sdpa"  # type: ignore[method-assign]
    monkey_patch._flash_attention_forward = attend


def main(socket: str, rank: str) -> None:
    """Make workers, call their methods and end them, until the socket is closed."""
    from lightning_verl.device import choose

    choose("cpu")
    import torch.distributed as dist
    from lightning_verl.worker import PolicyWorker

    stand_in_for_flash_attention()
    os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1")
    with Client(socket, family="AF_UNIX") as wire:
        wire.send(int(rank))
        while (asked := wire.recv()) is not None:
            method, arguments, named = asked
            if method == "make":
                os.environ["MASTER_PORT"] = named.pop("port")
                worker = PolicyWorker(*arguments, **named)
                answer = None
            else:
                answer = getattr(worker, method)(*arguments, **named)
            if method == "end":
                dist.destroy_process_group()
            wire.send(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])

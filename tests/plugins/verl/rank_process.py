"""One rank of a job in a process of its own, without Ray: `python rank_process.py SOCKET RANK` does what it is sent there."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Client


def main(socket: str, rank: str) -> None:
    """Make workers, call their methods and end them, until the socket is closed."""
    from lightning_verl.device import choose

    choose("cpu")
    import torch.distributed as dist
    from lightning_verl.worker import PolicyWorker

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

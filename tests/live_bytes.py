"""The bytes of tensors that live at one time, on any device, also of tensors without values."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the bytes of the tensors that are made inside the block and live, at present and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_of((args, kwargs)):  # the block has not made them, if they are not known
            self.note(tensor.untyped_storage(), counted=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            self.note(tensor.untyped_storage(), counted=True)
        return result

    def note(self, storage: torch.UntypedStorage, *, counted: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if counted else 0
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

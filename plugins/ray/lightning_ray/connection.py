"""The one connection to a Ray cluster that a process has. The Ray runner and the verl engine may both need it, at the same
time.

The invariant: only one of them connects at a time, and each ends only a connection that it made itself.
"""

from __future__ import annotations

import threading
from typing import Any

_BEGINS = threading.Lock()


def begin(ray: Any, **arguments: Any) -> bool:
    """Connect as `ray.init` does, unless this process is connected. Return True if this call connected, so that the caller ends
    the connection with `ray.shutdown`.

    Raises the errors of `ray.init`, after ending what it had started.
    """
    with _BEGINS:
        if ray.is_initialized():
            return False
        try:
            ray.init(**arguments)
        except BaseException:
            if not ray.is_initialized():  # else the program itself has connected meanwhile
                ray.shutdown()
            raise
        return True

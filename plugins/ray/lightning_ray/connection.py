"""The one connection to a Ray cluster that a process has: the Ray runner and the verl engine may both ask for it, and at once.

The invariant: while one of them begins it no other looks whether there is one; and nobody ends what somebody else began.
"""

from __future__ import annotations

import threading
from typing import Any

_BEGINS = threading.Lock()


def begin(ray: Any, **arguments: Any) -> bool:
    """Connect as `ray.init` does, unless this process is connected; whether it was done here, so that `ray.shutdown` ends it.

    Raises what `ray.init` raises; what it had started until then is ended.
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

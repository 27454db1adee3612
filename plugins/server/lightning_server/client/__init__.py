"""Lightning Client: runs agents for Lightning Servers, anywhere.

    from lightning_server.client import Client

    Client("http://gpu-machine:8000", agent).run()          # the token is in LIGHTNING_TOKEN; Ctrl-C or SIGTERM drains

The invariant: importing this package connects to nothing and starts nothing.
"""

from __future__ import annotations

from lightning_server.client.client import AttemptCounts, Client

__all__ = ["AttemptCounts", "Client"]

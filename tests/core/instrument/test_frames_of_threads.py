"""Looking at what other threads do must not lock the process up, whatever the collector does meanwhile."""

from __future__ import annotations

import subprocess
import sys

CHURN = """
import gc, threading, time
from lightning.instrument.context import activate
from lightning.types import LLM

class Node:
    def __init__(self): self.me = self
    def __del__(self): time.sleep(0)  # lets another thread run

def churn():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

for _ in range(3):
    threading.Thread(target=churn, daemon=True).start()
gc.set_threshold(5)
llm, end = LLM("http://127.0.0.1:1/v1", "a.b.c", "policy"), time.monotonic() + 0.5
while time.monotonic() < end:
    for _ in range(5):
        Node()
    with activate(llm):
        pass
"""


def test_rollouts_begin_and_end_while_threads_come_and_go_and_garbage_is_collected() -> None:
    done = subprocess.run([sys.executable, "-c", CHURN], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

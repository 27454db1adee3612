"""What tests need of the machine they run on."""

from __future__ import annotations

import pytest
from lightning.policy_server.auto_settings import this_machine

bfloat16_kernels = pytest.mark.skipif(
    this_machine().emulates_bfloat16, reason="a real model takes minutes a prompt in bfloat16 on a CPU without AVX-512"
)
"""For tests that compute a real model in bfloat16."""

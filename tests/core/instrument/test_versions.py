"""Versions an adapter was made for, and those it was not."""

from __future__ import annotations

import importlib.metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.errors import PluginError
from lightning.instrument import check_supported

RANGE = {"acme": ("1.2", "2")}


@pytest.mark.parametrize("version", ["1.2", "1.2.0", "1.2.post1", "1.10", "1.99.3rc1", "v1.3", "1.2+cpu"])
def test_inside(install, version: str) -> None:
    install("acme", version=version)
    check_supported(RANGE)


@pytest.mark.parametrize("version", ["1.1.9", "1", "0.9", "2", "2.0.0rc1", "10.0", "1!1.1", "unknown"])
def test_outside_says_what_is_installed_what_would_work_and_how(install, version: str) -> None:
    install("acme", version=version)
    with pytest.raises(PluginError) as caught:
        check_supported(RANGE)
    assert f"acme {version} is installed" in str(caught.value)
    assert "pip install 'acme>=1.2,<2'" in str(caught.value)


def test_what_is_not_installed_is_not_checked() -> None:
    check_supported({"no-such-distribution": ("1", "2")})


@given(st.tuples(*[st.integers(0, 30)] * 3), st.tuples(*[st.integers(0, 30)] * 2))
def test_numbers_are_compared_as_numbers(version: tuple[int, ...], low: tuple[int, ...]) -> None:
    def installed(name: str) -> str:
        return ".".join(map(str, version))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", installed)
        try:
            check_supported({"acme": (".".join(map(str, low)), "100")})
            allowed = True
        except PluginError:
            allowed = False
    assert allowed == (version >= (*low, 0))

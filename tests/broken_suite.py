"""A pytest plugin: the suite itself is broken where it asks for gradients, if BROKEN says so."""

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Raises what no record tells of."""
    if os.environ.get("BROKEN") and pyfuncitem.name.startswith("test_gradients"):
        raise RuntimeError("the suite is broken")

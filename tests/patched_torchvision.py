"""A pytest plugin: torchvision's own tests of its operators, with `kernels.patch_torchvision` on.

In a clone of torchvision, at the version that is installed:

    PYTHONPATH=.../gradparity/tests python -m pytest -p patched_torchvision test/test_ops.py

Everything passes, but for what the patch changes on purpose, which must fail.
"""

from __future__ import annotations

import pytest

from kernels import patch_torchvision

# By the end of a test's name without parameters.
DIFFERENCES = {
    "TestDeformConv::test_wrong_sizes": "what doesn't fit is a ValueError with another sentence",
}


def pytest_configure(config: pytest.Config) -> None:
    """Patches before torchvision's tests are collected, for the whole run."""
    patch_torchvision()


def pytest_report_header(config: pytest.Config) -> str:
    """Says so."""
    return "torchvision's operators: replaced by kernels.patch_torchvision"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expects the known differences, also of the tests that torch generates from these."""
    for item in items:
        for name, reason in DIFFERENCES.items():
            group, _, test = name.rpartition("::")
            if item.name.partition("[")[0] == test or (
                group and group in item.nodeid and item.name.endswith(f"__{test}")
            ):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

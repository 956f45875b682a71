"""What `pip install` adds. It must not up- or downgrade anything of the environment that it comes to."""

from __future__ import annotations

import sysconfig
from importlib.metadata import distributions

from setuptools import setup


def _major_version(package: str) -> int | None:
    """The installed major version, read from the environment itself: an isolated build doesn't see it on sys.path."""
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    versions = [found.version for found in distributions(path=places) if found.metadata["Name"] == package]
    return int(versions[0].split(".")[0]) if versions else None


# pandas 3 would replace a numpy 1, and pyarrow 26 does not start with one; what is installed already stays.
_old_numpy = _major_version("numpy") == 1


def _for_old_numpy(package: str, bound: str) -> str:
    return f"{package}<{bound}" if _old_numpy and _major_version(package) is None else package


# torch and torchvision are left out on purpose: pip must never replace a maintainer's own build.
setup(
    install_requires=[
        "click",
        "covertable>=3.2",
        "filelock",
        "jinja2",
        "numpy",
        "packaging",
        _for_old_numpy("pandas", "3"),
        "platformdirs",
        _for_old_numpy("pyarrow", "25"),
        "pytest>=8",
        "pytest-xdist>=3.5",
        "rich",
        "tabulate",
        "tomli; python_version < '3.11'",
    ]
)

"""Makes `import mmcv.ops` work: an installed mmcv as it is, else mmcv's own sources, fetched and built.

The environment stays as it was: packages go to the cache folder, which is searched after everything else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import filelock

from conformance.providers.mmcv import extension
from conformance.providers.protocol import UnavailableError
from kernels.build import BuildError, cache_dir

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_PIP_INSTALL = (
    *("-m", "pip", "install", "--no-deps", "--only-binary=:all:"),
    *("--no-input", "--disable-pip-version-check", "--retries=1"),
)


def load() -> None:
    """Imports mmcv.ops, after installing and building what it lacks.

    Raises UnavailableError, at every later call too, when pip, the network or a compiler is missing, or when
    what is installed does not fit.
    """
    if reason := _failure():
        raise UnavailableError(reason)


@functools.cache
def _failure() -> str:
    """Why it failed, if it did: a failure is not tried again in this process."""
    try:
        _prepare()
    except (UnavailableError, BuildError) as error:
        return str(error)
    return ""


def _prepare() -> None:
    if importlib.util.find_spec("mmcv") is None:
        sys.path.append(str(_packages()))  # last, so that the environment's own packages win
        importlib.invalidate_caches()
    try:
        mmcv = importlib.import_module("mmcv")
        if not _has_extension():
            library = extension.build(mmcv.__version__, Path(mmcv.__path__[0], "ops/csrc"))
            sys.modules[extension.NAME] = extension.module(mmcv.__version__, library)
        importlib.import_module("mmcv.ops")
    except (UnavailableError, BuildError):
        raise
    except Exception as error:  # an import of somebody else's package may raise anything
        raise UnavailableError(f"mmcv does not import here: {type(error).__name__}: {error}") from error


def _has_extension() -> bool:
    with contextlib.suppress(ImportError):
        importlib.import_module(extension.NAME)
        return True
    return False


def _packages() -> Path:
    """The folder with the pinned packages, installed at first use under a lock."""
    tag = f"{sys.implementation.cache_tag} {sysconfig.get_platform()}"
    key = hashlib.sha256(_REQUIREMENTS.read_bytes() + tag.encode()).hexdigest()[:16]
    target = cache_dir() / f"mmcv-{key}"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target.with_suffix(".lock")):
            if not target.exists():  # another process may have installed it while this one waited
                _install(target)
    except OSError as error:
        raise UnavailableError(
            f"mmcv can't be written to the cache folder {target.parent}: {error}"
        ) from error
    return target


def _install(target: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise UnavailableError(
            f"mmcv is not installed, and {sys.executable} has no pip to fetch its sources with"
        )
    print(f"gradparity: fetching mmcv's sources into {target} (60 MB, once)", file=sys.stderr, flush=True)
    work = target.with_suffix(".tmp")
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    try:
        answer = subprocess.run(
            [sys.executable, *_PIP_INSTALL, "--target", str(work), "-r", str(_REQUIREMENTS)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if answer.returncode != 0:
            errors = [line for line in answer.stderr.splitlines() if line.startswith("ERROR:")]
            reason = errors[0] if errors else answer.stderr.strip()[-300:]
            raise UnavailableError(f"mmcv is not installed, and pip can't fetch its sources: {reason}")
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)

"""Environments of other releases: a virtual environment with a Python that has wheels of them, for a worker.

mmcv has no wheels with operators on PyPI; they are built from its source distribution (the narrow build).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from conformance.providers.mmcv import extension, narrow
from conformance.providers.protocol import UnavailableError
from kernels.build import BuildError, Torch, cache_dir

_CONSTRAINTS = Path(__file__).with_name("environments.txt")
_MMCV = ("mmcv", "mmcv-full", "mmcv-lite")
_MMCV_NEEDS = ("addict", "opencv-python-headless", "packaging", "pyyaml", "yapf")
_VERSIONS = tuple(f"3.{minor}" for minor in range(15, 5, -1))
# Written last: an environment without it was not finished.
_MADE = "gradparity-environment.json"
_EXTENSION = """\
import os, sys
from mmcv.gradparity_narrow import NarrowExtension
sys.modules[__name__] = NarrowExtension(__name__, os.path.join(os.path.dirname(__file__), {library!r}), {version!r})
"""


class CannotMakeError(Exception):
    """The environment can't be made; the message says in one sentence what is missing."""


def create(requirements: Sequence[str], version: str | None = None, folder: Path | None = None) -> Path:
    """Makes a virtual environment with these requirements of pip's form, and returns its Python.

    Args:
        requirements: such as "torchvision==0.10.0", "mmcv-full==1.6.2"; a torchvision brings its torch.
        version: of Python, such as "3.6"; without it, the newest one here that the requirements have wheels for.
        folder: where to; without it, in the cache folder. An environment that was made there already is kept.

    Raises:
        CannotMakeError: a requirement without a form, no such Python, no wheels, no network, a failing build.
    """
    parsed = [_parse(requirement) for requirement in requirements]
    if not parsed:
        raise CannotMakeError("requirements: got none, expected some such as torchvision==0.10.0")
    mmcv = [each for each in parsed if canonicalize_name(each.name) in _MMCV]
    wheels = [each for each in parsed if each not in mmcv]
    if mmcv and not wheels:
        raise CannotMakeError(
            f"requirements: {mmcv[0]} is built against a torch: name torch or torchvision too"
        )
    version, interpreter = _choose_python(wheels, version)
    folder = folder or cache_dir() / "environments" / "-".join(["py" + version, *map(_slug, parsed)])
    python = folder / "bin" / "python"
    made = {"requirements": sorted(map(str, parsed)), "python": version}
    if (folder / _MADE).is_file():
        if json.loads((folder / _MADE).read_text()) != made:
            raise CannotMakeError(f"folder: {folder} holds an environment of something else")
        return python
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise CannotMakeError(f"folder: {folder} is not empty, and no virtual environment")
    _run([interpreter, "-m", "venv", "--clear", str(folder)])
    _pip(python, "install", "--upgrade", "pip")  # alone: an old one takes releases that refuse its Python
    _pip(python, "install", "--upgrade", "setuptools", "wheel")
    _pip(python, "install", "numpy", *map(str, wheels))
    for each in mmcv:
        _install_mmcv(python, each)
    (folder / _MADE).write_text(json.dumps(made))
    return python


def _parse(text: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        raise CannotMakeError(f"requirements: got {text!r}, expected NAME==VERSION") from error


def _slug(requirement: Requirement) -> str:
    return str(requirement).replace("==", "-").replace(" ", "").replace("/", "-")


def interpreters() -> dict[str, str]:
    """The Pythons of this machine, by version, the newest first: on the PATH, and pyenv's."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for version in _VERSIONS:
        named = [*sorted(pyenv.glob(f"{version}.*/bin/python{version}")), shutil.which(f"python{version}")]
        for path in filter(None, named):
            if version not in found and _works(str(path), version):
                found[version] = str(path)
    return {version: found[version] for version in _VERSIONS if version in found}


def _works(python: str, version: str) -> bool:
    """pyenv's shims answer for versions that are not chosen: with an error."""
    answer = subprocess.run(
        [python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.returncode == 0 and answer.stdout.strip() == version


def _choose_python(wheels: Sequence[Requirement], wanted: str | None) -> tuple[str, str]:
    here = interpreters()
    if wanted is not None and wanted not in here:
        raise CannotMakeError(f"python: there is no Python {wanted} here, there are {_listed(here)}")
    for version in [wanted] if wanted else here:
        if all(_has_wheel(each, version) for each in wheels):
            return version, here[version]
    names = " and ".join(map(str, wheels))
    if wanted:
        raise CannotMakeError(f"python: pip finds no wheels of {names} for Python {wanted}")
    elsewhere = [version for version in _VERSIONS if all(_has_wheel(each, version) for each in wheels)]
    needed = (
        f"needs Python {_listed(elsewhere)}"
        if elsewhere
        else "has no wheels that pip can find for any Python"
    )
    raise CannotMakeError(f"{names} {needed}, and here are {_listed(here)}")


def _listed(versions: Sequence[str] | dict[str, str]) -> str:
    return ", ".join(sorted(versions, key=lambda version: int(version.split(".")[1])))


def _has_wheel(requirement: Requirement, version: str) -> bool:
    with tempfile.TemporaryDirectory() as target:
        command = [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--no-input"),
            *("--only-binary=:all:", "--disable-pip-version-check"),
            *("--target", target, "--python-version", version, str(requirement)),
        ]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _install_mmcv(python: Path, requirement: Requirement) -> None:
    """mmcv's Python side from its source distribution, and the operators that are compared as its `_ext`."""
    with tempfile.TemporaryDirectory() as work:
        # With its operators switched on, its setup.py gives the distribution the name that pip asked for.
        _pip(
            python,
            *("download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "--dest", work),
            str(requirement),
            environment={"MMCV_WITH_OPS": "1"},
        )
        (archive,) = Path(work).iterdir()
        with tarfile.open(archive) as tar:
            tar.extractall(work, filter="data")
        source = next(Path(work).glob("*/mmcv"))
        needs = [*_MMCV_NEEDS, *(["mmengine"] if _major(source) >= 2 else [])]
        _pip(python, "install", "--only-binary=:all:", *needs)
        site = _output([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        target = Path(shutil.copytree(source, Path(site) / "mmcv"))
    mmcv_version = _mmcv_version(target)
    try:
        library = extension.build(mmcv_version, target / "ops/csrc", Torch.of(str(python)))
    except (BuildError, UnavailableError) as error:
        raise CannotMakeError(f"the operators of {requirement} can't be built: {error}") from error
    shutil.copy(library, target)
    shutil.copy(str(narrow.__file__), target / "gradparity_narrow.py")
    (target / "_ext.py").write_text(_EXTENSION.format(library=library.name, version=mmcv_version))


def _mmcv_version(package: Path) -> str:
    for line in (package / "version.py").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "__version__":
            return value.strip().strip("'\"")
    raise CannotMakeError(f"mmcv: {package} does not say its version")


def _major(package: Path) -> int:
    return int(_mmcv_version(package).split(".")[0])


def _pip(python: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
    command, *rest = arguments
    _run(
        [str(python), "-m", "pip", command, "--constraint", str(_CONSTRAINTS), "--no-input", *rest],
        environment,
    )


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """Runs a command, and shows what it says only when it fails."""
    print("gradparity: " + " ".join(command), file=sys.stderr, flush=True)
    _output(command, environment)


def _output(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except OSError as error:
        raise CannotMakeError(f"{command[0]} can't be run: {error}") from error
    if answer.returncode != 0:
        lines = [line for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise CannotMakeError(f"{' '.join(command[:4])} failed: {' '.join(errors)[:500]}")
    return answer.stdout.strip()

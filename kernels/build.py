"""C++ sources -> shared library of torch operators, cached by content and locked against parallel workers.

`torch.utils.cpp_extension` is not used: it needs setuptools, ties the result to one Python, and its lock
outlives a killed process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import filelock
import platformdirs
import torch

CACHE_VARIABLE = "GRADPARITY_CACHE"
"""The environment variable that moves the cache folder."""

SANITIZE_VARIABLE = "GRADPARITY_SANITIZE"
"""The environment variable that names sanitizers to build with, as the compiler's -fsanitize takes them."""

_MAX_JOBS = 2
_SECONDS_PER_SOURCE = 15
_MAX_ERROR_LINES = 8

_load_lock = threading.Lock()
_loaded: set[Path] = set()


class BuildError(RuntimeError):
    """A library can't be built here; the message says why in one sentence, then quotes the compiler."""


@dataclass(frozen=True)
class Torch:
    """An installation of torch to build against: its folder, the ABI of its strings, and what tells it from others."""

    root: Path
    cxx11_abi: bool
    identity: str

    @classmethod
    def of(cls, python: str) -> Torch:
        """The torch of another Python. Raises BuildError when it has none."""
        answer = subprocess.run([python, "-c", _DESCRIBE_TORCH], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise BuildError(f"{python} has no torch: {answer.stderr.strip().splitlines()[-1]}")
        root, *rest = json.loads(answer.stdout)
        return cls(Path(root), *rest)


_DESCRIBE_TORCH = """
import json, os, torch
identity = "\\n".join(map(str, (torch.__version__, torch.version.git_version, torch.__config__.show())))
print(json.dumps([os.path.dirname(torch.__file__), bool(torch._C._GLIBCXX_USE_CXX11_ABI), identity]))
"""


@functools.cache
def _own_torch() -> Torch:
    identity = "\n".join((torch.__version__, str(torch.version.git_version), torch.__config__.show()))
    return Torch(Path(torch.__file__).parent, torch.compiled_with_cxx11_abi(), identity)


def cache_dir() -> Path:
    """The folder that holds the built libraries: $GRADPARITY_CACHE, else the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("gradparity"))


def build_library(
    name: str,
    sources: Sequence[Path],
    *,
    include_dirs: Sequence[Path] = (),
    depends: Sequence[Path] = (),
    flags: Sequence[str] = (),
    against: Torch | None = None,
) -> Path:
    """Builds a shared library against the installed torch or another one, or finds it in the cache.

    Args:
        name: stem of the library's file name, also used in messages.
        sources: C++ files, each compiled to one object, two at a time.
        include_dirs: folders for the compiler's ``-I``.
        depends: further files whose contents the result depends on (the headers below `include_dirs`).
        flags: appended to the compiler's and the linker's command lines.
        against: None is the torch of this process.

    Returns:
        The library's path. It is new exactly when a source, a depended file, a flag, the compiler or torch
        changed; the Python version plays no part.

    Raises:
        BuildError: no compiler, a file that is missing, an unwritable cache folder, a compile error.
    """
    compiler, against = _compiler(), against or _own_torch()
    options = [*_default_flags(against), *flags]
    key = _key(compiler, options, against, sources, depends)
    target = cache_dir() / f"{name}-{key}{_suffix()}"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock"), name):
            if not target.exists():  # another process may have built it while this one waited
                _build(name, compiler, options, against, sources, include_dirs, target)
    except OSError as error:
        raise BuildError(f"can't write {name} to the cache folder {target.parent}: {error}") from error
    return target


def load_library(
    name: str,
    sources: Sequence[Path],
    *,
    include_dirs: Sequence[Path] = (),
    depends: Sequence[Path] = (),
    flags: Sequence[str] = (),
) -> Path:
    """`build_library`, then registers the library's operators with torch, once per process.

    Raises BuildError like `build_library`, and when the built library can't be loaded.
    """
    with _load_lock:
        path = build_library(name, sources, include_dirs=include_dirs, depends=depends, flags=flags)
        if path not in _loaded:
            try:
                torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            except OSError as error:
                raise BuildError(f"the built library {path} can't be loaded: {error}") from error
            _loaded.add(path)
        return path


def _compiler() -> tuple[str, ...]:
    """The C++ compiler's command: $CXX, else the first of c++, g++ and clang++ on the path."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    candidates = [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]
    for program, *arguments in candidates:
        found = shutil.which(program)
        if found is not None:
            return (found, *arguments)
    if chosen:
        raise BuildError(f"no C++ compiler: CXX names {chosen[0]!r}, which is not a program on this machine")
    raise BuildError("no C++ compiler: CXX is not set, and none of c++, g++, clang++ is on the PATH")


@functools.lru_cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    try:
        answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"no C++ compiler: {shlex.join(compiler)} can't be run: {error}") from error
    if answer.returncode != 0:
        raise BuildError(f"no C++ compiler: {shlex.join(compiler)} --version fails: {_head(answer.stderr)}")
    return answer.stdout


def _default_flags(against: Torch) -> list[str]:
    abi = int(against.cxx11_abi)
    flags = ["-O3", "-fPIC", "-std=c++20", "-ffp-contract=off", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    if sanitizers := os.environ.get(SANITIZE_VARIABLE):
        # Functions that the loader chooses run before a sanitizer is ready, so there is one clone of each.
        flags += [
            f"-fsanitize={sanitizers}",
            "-fno-sanitize-recover=all",
            "-g",
            "-O1",
            "-DGRADPARITY_CLONES=",
        ]
    # Apple's clang has no OpenMP runtime of its own; the loops then run on one thread.
    return flags if sys.platform == "darwin" else [*flags, "-fopenmp"]


def _suffix() -> str:
    return ".dylib" if sys.platform == "darwin" else ".so"


def _key(
    compiler: tuple[str, ...],
    options: Sequence[str],
    against: Torch,
    sources: Sequence[Path],
    depends: Sequence[Path],
) -> str:
    digest = hashlib.sha256()

    def add(*parts: str | bytes | None) -> None:
        for part in parts:
            content = part if isinstance(part, bytes) else str(part).encode()
            digest.update(len(content).to_bytes(8, "little") + content)

    add(*compiler, _compiler_version(compiler), *options)
    add(against.identity)
    for path in (*sources, *sorted(depends)):
        try:
            add(path.name, path.read_bytes())
        except OSError as error:
            raise BuildError(f"a source file can't be read: {error}") from error
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Holds a lock that the system frees when its process dies, and says so when it has to wait."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _say(f"waiting for another process that builds {name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(
    name: str,
    compiler: tuple[str, ...],
    options: Sequence[str],
    against: Torch,
    sources: Sequence[Path],
    include_dirs: Sequence[Path],
    target: Path,
) -> None:
    jobs = min(_MAX_JOBS, len(sources), os.cpu_count() or 1)
    estimate = _SECONDS_PER_SOURCE * -(-len(sources) // max(jobs, 1))
    _say(f"building {name} (about {estimate} s, cached afterwards)")
    start = time.monotonic()

    work = target.with_suffix(".tmp")
    shutil.rmtree(work, ignore_errors=True)  # left by a process that was killed
    work.mkdir()
    try:
        torch_includes = (against.root / "include", against.root / "include/torch/csrc/api/include")
        includes = [f"-I{path}" for path in include_dirs]
        includes += [part for path in torch_includes for part in ("-isystem", str(path))]
        objects = [work / f"{number}.o" for number in range(len(sources))]
        commands = [
            [*compiler, *options, *includes, "-c", str(source), "-o", str(object_)]
            for source, object_ in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            tuple(pool.map(functools.partial(_run, name), commands))
        library = work / target.name
        link = ["-shared", *map(str, objects), f"-L{against.root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        # Options come last, because a library among them must stand behind the objects that need it.
        _run(name, [*compiler, *link, *options, "-o", str(library)])
        os.replace(library, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _say(f"built {name} in {time.monotonic() - start:.0f} s")


def _run(name: str, command: Sequence[str]) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if answer.returncode != 0:
        output = answer.stderr or answer.stdout
        raise BuildError(f"{name} does not compile with {command[0]}:\n{_head(output)}")


def _head(output: str) -> str:
    """The first error of a compiler's output with the lines after it."""
    lines = output.splitlines()
    first = next((number for number, line in enumerate(lines) if "error: " in line), 0)
    return "\n".join(lines[first : first + _MAX_ERROR_LINES])


def _say(message: str) -> None:
    print(f"gradparity: {message}", file=sys.stderr, flush=True)

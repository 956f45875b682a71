"""The builder: one clear sentence when it can't build, one build for any number of processes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build
from kernels.build import BuildError, build_library

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRADPARITY_CACHE", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def test_a_library_is_built_once_and_says_so(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = build_library("answer", [source])
    assert "building answer (about" in capsys.readouterr().err
    assert build_library("answer", [source]) == first
    assert capsys.readouterr().err == ""
    assert first.exists()


def test_sources_depended_files_flags_and_the_compiler_make_the_key(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "answer.h"
    header.write_text("// one")
    monkeypatch.setattr(build, "_build", lambda *arguments: arguments[-1].touch())

    def path() -> Path:
        return build_library("answer", [source], depends=[header])

    seen = [path(), build_library("answer", [source], depends=[header], flags=["-DX"])]
    header.write_text("// two")
    seen.append(path())
    source.write_text(SOURCE + "\n")
    seen.append(path())
    wrapper = tmp_path / "another-compiler"
    wrapper.write_text("#!/bin/sh\necho another 1.0\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    seen.append(path())
    assert len(set(seen)) == len(seen)


def test_cxx_that_is_no_program(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++ -m64")
    with pytest.raises(BuildError, match="CXX names '/nowhere/c\\+\\+', which is not a program"):
        build_library("answer", [source])


def test_no_compiler_at_all(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"none of c\+\+, g\+\+, clang\+\+ is on the PATH"):
        build_library("answer", [source])


def test_a_compile_error_is_quoted_and_leaves_nothing(source: Path, cache: Path) -> None:
    source.write_text("int f() { return undeclared_name; }\n")
    with pytest.raises(BuildError, match=r"answer does not compile with .*\n.*undeclared_name") as caught:
        build_library("answer", [source])
    assert len(str(caught.value).splitlines()) < 12
    assert [path.suffix for path in cache.iterdir()] in ([], [".lock"])


def test_a_source_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"a source file can't be read: .*absent\.cpp"):
        build_library("answer", [tmp_path / "absent.cpp"])


def test_a_cache_that_is_no_folder(source: Path, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(BuildError, match="can't write answer to the cache folder"):
        build_library("answer", [source])


def test_a_killed_build_is_no_obstacle(source: Path, cache: Path) -> None:
    path = build_library("answer", [source])
    path.rename(path.with_suffix(".old"))
    path.with_suffix(".tmp").mkdir()
    (path.with_suffix(".tmp") / "0.o").write_text("half an object")
    assert build_library("answer", [source]) == path
    assert not path.with_suffix(".tmp").exists()


def test_a_library_that_does_not_load(source: Path) -> None:
    source.write_text("extern int nowhere(); int f() { return nowhere(); }\n")
    with pytest.raises(BuildError, match="can't be loaded"):
        build.load_library("answer", [source])


def test_two_processes_build_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "compilations"
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" != --version ]; then echo x >> {shlex.quote(str(log))}; sleep 1; fi\n'
        'exec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    script = (
        "import sys; from pathlib import Path; from kernels.build import build_library\n"
        "print(build_library('answer', [Path(sys.argv[1])]))"
    )
    command = [sys.executable, "-c", script, str(source)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert log.read_text().count("x") == 2  # one object and one link

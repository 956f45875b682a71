"""`python tests/sanitized.py COMMAND...` runs it with kernels that check every access and every undefined step.

A finding ends the process. The compiler's sanitizer runtimes must be loaded before Python's own libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

SANITIZERS = "address,undefined,float-cast-overflow"
# libstdc++ too, because the address sanitizer must find its __cxa_throw. Python's own memory is never freed.
LIBRARIES = ("libasan.so", "libstdc++.so")
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
}


def main() -> None:
    """Replaces this process by the command."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler or len(sys.argv) < 2:
        sys.exit("usage: python tests/sanitized.py COMMAND..., with g++ on the PATH or in CXX")
    found = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in LIBRARIES
    ]
    if absent := [path for path in found if not os.path.isabs(path)]:
        sys.exit(f"{compiler} has no {absent[0]}")
    environment = {
        "GRADPARITY_SANITIZE": SANITIZERS,
        "LD_PRELOAD": " ".join(found),
        "CXX": compiler,
        **OPTIONS,
    }
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment})


if __name__ == "__main__":
    main()

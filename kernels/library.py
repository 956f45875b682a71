"""The compiled operators: built at first use, then known to every part of torch."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from pathlib import Path

import torch

from kernels.build import load_library

CSRC = Path(__file__).parent / "csrc"
NAME = "gradparity_kernels"

# Fake tensors live on "meta" too: nothing is computed there but shapes.
DEVICES = ("cpu", "meta")

_lock = threading.Lock()
_loaded: torch.library.Library | None = None


def serves(device: torch.device) -> bool:
    """Whether the compiled operators run there, under the transforms of torch.func that are active.

    Their forward mode goes up to second order: not jacfwd of jacfwd, nor a jvp around two gradients.
    """
    if device.type not in DEVICES:
        return False
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return True
    kinds = [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()]
    forward = kinds.count(torch._C._functorch.TransformType.Jvp)
    return forward + kinds.count(torch._C._functorch.TransformType.Grad) < 3 and forward < 2


def load() -> None:
    """Builds (or finds) and registers the operators, once per process. Raises BuildError."""
    global _loaded
    if (
        _loaded is not None
    ):  # without the lock, so that a compiler which traces this sees no more than a constant
        return
    with _lock:
        if _loaded is None:
            sources = sorted(CSRC.rglob("*.cpp"))
            load_library(NAME, sources, include_dirs=[CSRC], depends=sorted(CSRC.rglob("*.h")))
            _loaded = _register()


def _register() -> torch.library.Library:
    import kernels.raw as raw
    from kernels.raw.operator import NAMESPACE, register

    library = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for found in pkgutil.iter_modules(raw.__path__):
        module = importlib.import_module(f"{raw.__name__}.{found.name}")
        for operator in getattr(module, "OPERATORS", ()):
            register(operator, library)
    return library

"""Running something that may kill its process in another one, or change what others see of torch.

The child is forked, so that it needs no import and no copy of the inputs; its tensors come back in .npy files, never
pickled. A signal, a hang and the want of memory become exceptions of the parent.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance import worker

GIBIBYTE = 2**30


@dataclass(frozen=True)
class Limits:
    """What one computation may take: seconds, and bytes beyond what its process has already (None: any number)."""

    time_s: float = 60.0
    memory: int | None = 8 * GIBIBYTE


DEFAULT_LIMITS = Limits()

# The first backward decides whether autograd has threads for devices, with which it refuses to work in a fork: before
# torch.export, in strict mode, makes it see one that is not there.
torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


class CrashedError(Exception):
    """The child died; the message names the signal."""


class TimedOutError(Exception):
    """The child did not finish in time."""


class OutOfMemoryError(Exception):
    """The child wanted more memory than its limit."""


class RefusedError(Exception):
    """The child raised an exception; the message holds its type and text."""


@contextmanager
def preserved_state() -> Iterator[None]:
    """Whatever is set inside, torch's global settings and Python's warning filters are as before afterwards."""
    grad, threads, dtype = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    autocast, autocast_dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    random = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_autocast_dtype("cpu", autocast_dtype)
        torch.set_rng_state(random)


def run_isolated(
    compute: Callable[[], dict[str, Tensor | None]], limits: Limits = DEFAULT_LIMITS
) -> dict[str, Tensor | None]:
    """What ``compute`` returns, from a process of its own.

    Raises CrashedError, TimedOutError, OutOfMemoryError, or RefusedError when ``compute`` raised.
    """
    with new_folder() as folder:
        child = worker.Child(lambda _: {"tensors": write_tensors(compute(), folder)})
        outcome = child.ask({}, limits.time_s, limits.memory)
        if child.alive:
            child.end()
        raise_failure(outcome)
        return read_tensors(outcome["tensors"])


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for arrays that travel between processes: in memory, where the system has such."""
    shared = "/dev/shm"
    return tempfile.TemporaryDirectory(
        prefix="gradparity-", dir=shared if os.access(shared, os.W_OK) else None
    )


def write_tensors(tensors: Mapping[str, Tensor | None], folder: str, prefix: str = "") -> dict[str, Any]:
    """Writes each tensor into a file of ``folder``, and describes all of them for JSON."""
    return {
        name: None if tensor is None else worker.write_tensor(tensor, f"{folder}/{prefix}{number}.npy")
        for number, (name, tensor) in enumerate(tensors.items())
    }


def read_tensors(described: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """The tensors of a description."""
    return {name: None if each is None else worker.read_tensor(each) for name, each in described.items()}


def raise_failure(outcome: Mapping[str, Any]) -> None:
    """Raises what a child's outcome says of its end, if it did not return."""
    if "raised" in outcome:
        raise RefusedError(outcome["raised"])
    if "died" in outcome:
        raise CrashedError(f"the process died of {outcome['died']}")
    if "left" in outcome:
        raise CrashedError(f"the process left with status {outcome['left']}")
    if "late" in outcome:
        raise TimedOutError(f"the process did not finish within {outcome['late']:g} s")
    if "memory" in outcome:
        raise OutOfMemoryError(f"the process wanted more than {outcome['memory'] / GIBIBYTE:g} GiB of memory")

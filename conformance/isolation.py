"""Running something that may kill its process in another one, or change what others see of torch.

The child is forked, so that it needs no import and no copy of the inputs; its tensors come back in a .npz file,
never pickled. A signal and a hang become exceptions of the parent.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TIME_LIMIT_S = 60.0


class CrashedError(Exception):
    """The child died; the message names the signal."""


class TimedOutError(Exception):
    """The child did not finish in time."""


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
    compute: Callable[[], dict[str, Tensor | None]], time_limit_s: float = TIME_LIMIT_S
) -> dict[str, Tensor | None]:
    """What ``compute`` returns, from a process of its own.

    Raises CrashedError, TimedOutError, or RefusedError when ``compute`` raised.
    """
    with tempfile.TemporaryDirectory(prefix="gradparity-") as folder:
        child = os.fork()
        if child == 0:
            _run_child(compute, Path(folder))
        status = _wait(child, time_limit_s)
        if os.WIFSIGNALED(status):
            raise CrashedError(f"the process died of {signal.Signals(os.WTERMSIG(status)).name}")
        outcome = Path(folder) / "outcome.json"
        if os.WEXITSTATUS(status) or not outcome.exists():
            raise CrashedError(f"the process left with status {os.WEXITSTATUS(status)}")
        return _read(outcome)


def _run_child(compute: Callable[[], dict[str, Tensor | None]], folder: Path) -> None:
    try:
        # A crash is a result here, not something to be told on the terminal.
        faulthandler.disable()
        # A forked child has none of its parent's threads; a second one here would wait for them forever.
        torch.set_num_threads(1)
        outcome = _write(compute, folder)
        (folder / "outcome.json").write_text(json.dumps(outcome))
        os._exit(0)
    finally:
        os._exit(1)


def _write(compute: Callable[[], dict[str, Tensor | None]], folder: Path) -> dict[str, object]:
    try:
        tensors = compute()
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}
    dtypes = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if tensor is not None:
            dtypes[name] = (number, str(tensor.dtype).removeprefix("torch."))
            np.save(folder / f"{number}.npy", tensor.detach().cpu().double().numpy(), allow_pickle=False)
    return {"names": list(tensors), "dtypes": dtypes}


def _read(outcome: Path) -> dict[str, Tensor | None]:
    described = json.loads(outcome.read_text())
    if "raised" in described:
        raise RefusedError(described["raised"])
    tensors: dict[str, Tensor | None] = dict.fromkeys(described["names"])
    for name, (number, dtype) in described["dtypes"].items():
        values = np.load(outcome.parent / f"{number}.npy", allow_pickle=False)
        tensors[name] = torch.as_tensor(values).to(getattr(torch, dtype))
    return tensors


def _wait(child: int, time_limit_s: float) -> int:
    deadline = time.monotonic() + time_limit_s
    pause = 0.0005
    while True:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimedOutError(f"the process did not finish within {time_limit_s:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)

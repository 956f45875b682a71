"""Providers that tests load into workers: each does something that a released library has been seen to do."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor

import kernels

print("noise at import")


class Strange:
    """Its roi_align does what the sampling ratio says."""

    name = "strange"
    promises_everything = False

    def load(self) -> str:
        print("noise at load")
        return "1.0"

    def roi_align(self, input: Tensor, rois: Tensor, *, sampling_ratio: int, **_: Any) -> Tensor:
        print("noise", flush=True)
        os.write(1, b"more noise\n")
        if sampling_ratio == 1:
            ctypes.string_at(0)
        elif sampling_ratio == 2:
            time.sleep(60)
        elif sampling_ratio == 3:
            torch.ones(2**30)
        elif sampling_ratio == 4:
            os._exit(3)
        elif sampling_ratio == 5:
            raise ValueError("not today")
        elif sampling_ratio == 6:
            return torch.tensor([float(number) for number in (*input.stride(), os.getpid())])
        return input * 2


class NotHere(Strange):
    """It can't be used."""

    def load(self) -> str:
        raise ImportError("the strange library is not installed in this environment")


class DiesAtLoad(Strange):
    """Its import is a crash."""

    def load(self) -> str:
        print("last words", file=sys.stderr, flush=True)
        ctypes.string_at(0)
        return ""


class OneGradient:
    """Computes by itself, in numpy, and has no second order."""

    name = "one-gradient"
    operators = ("roi_align",)

    def load(self) -> str:
        return "2.0"

    def output(self, operator: str, arrays: dict[str, Any], arguments: dict[str, Any]) -> Any:
        assert isinstance(arguments["output_size"], tuple)
        return 3 * arrays["input"]

    def gradients(
        self,
        operator: str,
        arrays: dict[str, Any],
        arguments: dict[str, Any],
        grad_output: Any,
        wanted: list[str],
    ) -> dict[str, Any]:
        return {name: 3 * grad_output if name == "input" else None for name in wanted}


class Killer:
    """Kills whom KILL names ("self" or "parent") at its third call, once: the file MARKER says whether it did."""

    name = "killer"
    promises_everything = False
    calls = 0

    def load(self) -> str:
        return "1.0"

    def deform_conv2d(
        self, input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None, **arguments: Any
    ) -> Tensor:
        Killer.calls += 1
        marker = os.environ.get("MARKER", "")
        if marker and Killer.calls == 3 and not os.path.exists(marker):
            open(marker, "x").close()
            os.kill(os.getpid() if os.environ["KILL"] == "self" else os.getppid(), signal.SIGKILL)
            time.sleep(5)
        return kernels.deform_conv2d(input, offset, weight, bias, **arguments)

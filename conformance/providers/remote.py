"""Providers of other environments: any Python with its own torch, torchvision, mmcv or framework, in a worker.

`conformance/worker.py` computes; here its operators become torch functions with derivatives, so that every question
that only calls, differentiates and differentiates again can be put to them as to any other provider.
"""

from __future__ import annotations

import functools
import json
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from conformance import isolation, worker
from conformance.isolation import DEFAULT_LIMITS, CrashedError, Limits, RefusedError, TimedOutError
from conformance.providers.protocol import UnavailableError

# Importing a framework, or building a library first, may take minutes.
LOAD_TIME_LIMIT_S = 600.0
# What a worker may need beyond a computation's own limit before it is taken for dead.
GRACE_S = 30.0

_FOLDER = Path(__file__).parent


class Remote:
    """The provider ``kind`` of another Python: a file of this folder or of `frameworks`, or MODULE:ATTRIBUTE there.

    The ledger's entries about ``kind`` apply to it.
    """

    promises_everything = False
    # Set by the harness: what such a case leaves of the process that computed it is not used again.
    is_hostile = False

    def __init__(self, name: str, python: str, kind: str, limits: Limits = DEFAULT_LIMITS) -> None:
        self.name = name
        self.implementation = kind
        self._limits = limits
        self._worker = _Worker([python, worker.__file__, _spec_of(kind)])
        self._introduction: dict[str, Any] = {}

    @property
    def not_promised(self) -> dict[str, str]:
        """What needs the implementation in the harness's process, and what it does not promise or compute itself."""
        lacks = set(worker.QUANTITIES) - set(self._introduction.get("computes", worker.QUANTITIES))
        return {
            **_NEEDS_THE_PROCESS,
            **{
                f"*/{question}": f"it computes no {quantity.replace('_', ' ')}"
                for quantity in sorted(lacks, reverse=True)
                for question in _NEEDS[quantity]
            },
            **self._introduction.get("not_promised", {}),
        }

    def load(self) -> str:
        """Starts the worker and returns the version of what it found, with those of its torch and Python.

        Raises UnavailableError when there is no such Python or provider, or when it does not load.
        """
        self._introduction = self._worker.start()
        return f"{self._introduction['version']} ({self._introduction['surroundings']})"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The operators that the worker has."""
        if name.startswith("_") or name not in self._introduction.get("operators", ()):
            raise AttributeError(f"the provider {self.name} has no {name}")
        return functools.partial(self._layer if name.endswith("_pack") else self._function, name)

    def compute(
        self,
        quantity: str,
        operator: str,
        tensors: Mapping[str, Tensor | None],
        arguments: Mapping[str, Any],
        **further: Any,
    ) -> dict[str, Tensor | None]:
        """A quantity of an operator, computed over there.

        Raises CrashedError, TimedOutError, OutOfMemoryError or RefusedError, as `isolation.run_isolated` does.
        """
        if quantity not in self._introduction["computes"]:
            raise RefusedError(f"NotImplementedError: {self.name} computes no {quantity.replace('_', ' ')}")
        folder = self._worker.folder
        request = {
            "quantity": quantity,
            "operator": operator,
            "arguments": arguments,
            "tensors": isolation.write_tensors(tensors, folder, "tensor"),
        }
        if further:
            request["wanted"] = further["wanted"]
            request["grad_output"] = worker.write_tensor(further["grad_output"], f"{folder}/grad_output.npy")
        if "cotangents" in further:
            request["cotangents"] = isolation.write_tensors(further["cotangents"], folder, "cotangent")
        asked = {
            "request": request,
            "time_limit_s": self._limits.time_s,
            "memory_limit": self._limits.memory,
            "hostile": self.is_hostile,
        }
        outcome = self._worker.ask(asked, self._limits.time_s + GRACE_S)
        isolation.raise_failure(outcome)
        return isolation.read_tensors(outcome["tensors"])

    def _function(self, operator: str, **given: Any) -> Tensor:
        tensors = {name: value for name, value in given.items() if value is None or isinstance(value, Tensor)}
        arguments = {name: value for name, value in given.items() if name not in tensors}
        call = _Call(self, operator, arguments, tuple(tensors))
        output: Tensor = _Output.apply(call, *tensors.values())
        return output

    def _layer(self, operator: str, in_channels: int, out_channels: int, **arguments: Any) -> nn.Module:
        return _Layer(self, operator, {"in_channels": in_channels, "out_channels": out_channels, **arguments})


@dataclass(frozen=True)
class _Call:
    """An operator of a remote provider with its arguments, and the names of the tensors that it is given."""

    remote: Remote
    operator: str
    arguments: Mapping[str, Any]
    names: tuple[str, ...]

    def compute(
        self, quantity: str, tensors: Sequence[Tensor | None], **further: Any
    ) -> dict[str, Tensor | None]:
        named = dict(zip(self.names, tensors, strict=True))
        return self.remote.compute(quantity, self.operator, named, self.arguments, **further)


class _Output(torch.autograd.Function):
    """The operator, whose backward asks again."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor | None) -> Tensor | None:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.compute("output", tensors)["output"]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        names = ctx.call.names
        wanted = [name for name, needed in zip(names, ctx.needs_input_grad[1:], strict=True) if needed]
        gradients = _Gradients.apply(ctx.call, wanted, grad_output, *ctx.saved_tensors)
        by = dict(zip(wanted, gradients, strict=True))
        return None, *(by.get(name) for name in names)


class _Gradients(torch.autograd.Function):
    """The gradients of the wanted tensors, as a function of all tensors and of grad_output."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, wanted: list[str], grad_output: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.call, ctx.wanted = call, wanted
        ctx.save_for_backward(grad_output, *tensors)
        gradients = call.compute("gradients", tensors, wanted=wanted, grad_output=grad_output)
        return tuple(gradients[name] for name in wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grad_output, *tensors = ctx.saved_tensors
        second = ctx.call.compute(
            "double_backward",
            tensors,
            wanted=ctx.wanted,
            grad_output=grad_output,
            cotangents={
                name: each for name, each in zip(ctx.wanted, cotangents, strict=True) if each is not None
            },
        )
        return None, None, second["grad_output"], *(second.get(name) for name in ctx.call.names)


class _Layer(nn.Module):
    """A pack's parameters; the layer that they belong to is made over there, at each call."""

    def __init__(self, remote: Remote, operator: str, arguments: dict[str, Any]) -> None:
        super().__init__()
        dtype, device = arguments["dtype"], arguments["device"]
        described = {"dtype": str(dtype).removeprefix("torch."), "device": str(device)}
        self._layer = (remote, operator, {**arguments, **described})
        channels = arguments["in_channels"]
        height, width = arguments["kernel_size"]
        out_channels = arguments["out_channels"]
        per_tap = 3 if operator == "modulated_deform_conv2d_pack" else 2
        zeros = functools.partial(torch.zeros, dtype=dtype, device=device)
        self.weight = nn.Parameter(zeros(out_channels, channels // arguments["groups"], height, width))
        if arguments.get("bias"):
            self.bias = nn.Parameter(zeros(out_channels))
        self.conv_offset = nn.Conv2d(
            channels,
            per_tap * arguments["offset_groups"] * height * width,
            (height, width),
            dtype=dtype,
            device=device,
        )

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output."""
        tensors = {"input": input, **dict(self.named_parameters())}
        output: Tensor = _Output.apply(_Call(*self._layer, tuple(tensors)), *tensors.values())
        return output


class _Worker:
    """A worker process: started when it is first needed, and again when it died."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: Any = None  # a Popen with pipes, which its type does not say
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 as long as the process may be started again
        self._folder = isolation.new_folder()
        self.folder = self._folder.name

    def ask(self, request: Mapping[str, Any], time_limit_s: float) -> dict[str, Any]:
        """The answer to a request. Raises CrashedError or TimedOutError when there is none."""
        if self._process is None:
            self.start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._raise_death()
        return self._read(time_limit_s)

    def start(self) -> dict[str, Any]:
        """Starts the process and returns how it introduces itself. Raises UnavailableError when it does not."""
        try:
            self._process = subprocess.Popen(
                [*self._command, self.folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # an interrupt of the run is not one of the worker, which ends with its stdin
            )
        except OSError as error:
            raise UnavailableError(f"{self._command[0]} can't be run: {error.strerror}") from error
        try:
            introduction = self._read(LOAD_TIME_LIMIT_S)
        except (CrashedError, TimedOutError) as error:
            raise UnavailableError(f"its worker did not start: {error}{self._last_error()}") from error
        if "unavailable" in introduction:
            raise UnavailableError(introduction["unavailable"])
        return introduction

    def _read(self, time_limit_s: float) -> dict[str, Any]:
        readable, _, _ = select.select([self._process.stdout], [], [], time_limit_s)
        if not readable:
            self._process.kill()
            self._process.wait()
            self._process = None
            raise TimedOutError(f"the worker did not answer within {time_limit_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._raise_death()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            self._process.kill()
            self._process = None
            raise CrashedError(f"the worker answered {line[:80].decode(errors='replace')!r}") from None
        return answer

    def _raise_death(self) -> NoReturn:
        status, self._process = self._process.wait(), None
        how = f"died of {signal.Signals(-status).name}" if status < 0 else f"left with status {status}"
        raise CrashedError(f"the worker {how}")

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return "".join(f": {line.strip()}" for line in [line for line in lines if line.strip()][-1:])


# The questions that come to nothing without a quantity.
_NEEDS = {
    "gradients": ("gradients", "gradcheck", "double_backward", "gradgradcheck", "subsets", "batch"),
    "double_backward": ("double_backward", "gradgradcheck"),
}

# They trace, transform, time or pickle the implementation's own objects.
_NEEDS_THE_PROCESS = {
    **dict.fromkeys(
        (
            *("*/compile*", "*/export*", "*/opcheck", "*/forward_mode", "*/func.*", "*/vmap*"),
            *("*/autocast*", "*/memory", "*/threads", "*/deterministic"),
            *("*/deepcopy", "*/pickled", "*/state_dict"),
        ),
        "it is not in the process of the one who asks",
    )
}


def from_option(text: str, limits: Limits) -> Remote:
    """The provider of ``NAME=python:EXECUTABLE[,kind=KIND]``; KIND is NAME unless it is given.

    Raises ValueError when the text has another form.
    """
    name, _, place = text.partition("=")
    python, *options = place.split(",")
    executable = python.removeprefix("python:")
    kinds = [option.removeprefix("kind=") for option in options]
    if not name.strip() or not executable or executable == python or len(kinds) > 1 or kinds == options != []:
        raise ValueError(
            f"--provider: got {text!r}, expected MODULE:ATTRIBUTE or NAME=python:EXECUTABLE[,kind=KIND]"
        )
    return Remote(name, executable, kinds[0] if kinds else name, limits)


def _spec_of(kind: str) -> str:
    """What the worker loads."""
    if ":" in kind:
        return kind
    places = (_FOLDER / f"{kind}.py", _FOLDER / kind / "operators.py", _FOLDER / "frameworks" / f"{kind}.py")
    for place in places:
        if place.is_file():
            return str(place)
    raise ValueError(
        f"--provider: kind is {kind!r}, expected MODULE:ATTRIBUTE or one of {', '.join(kinds())}"
    )


def kinds() -> list[str]:
    """The implementations that a worker can load by name."""
    files = [*_FOLDER.glob("frameworks/[!_]*.py"), _FOLDER / "torchvision.py"]
    return sorted(
        [*(file.stem for file in files), *(file.parent.name for file in _FOLDER.glob("*/operators.py"))]
    )

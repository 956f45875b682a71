"""Timing several implementations of one operator against each other: interleaved, after checking that they agree."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conformance.providers import registry

Tensors = dict[str, Tensor]
Function = Callable[..., Tensor]
REFERENCE = "reference"


@dataclass(frozen=True)
class Contest:
    """Implementations as functions of the same tensors. `floors` compute something else, as a yardstick."""

    operator: str
    shape: str

    tensors: Tensors
    differentiated: tuple[str, ...]
    contestants: Mapping[str, Function]
    floors: Mapping[str, Function] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One contestant's time in one task. `ratio` is its time over the reference's, the median over rounds."""

    operator: str
    shape: str
    dtype: str
    threads: int
    task: str
    contestant: str
    milliseconds: float
    ratio: float
    note: str = ""


def provided(operator: str, **arguments: object) -> dict[str, Function]:
    """The operator of every provider that is available here and has it."""
    loaded = [registry.load(provider) for provider in registry.built_in()]
    return {
        one.name: functools.partial(getattr(one.provider, operator), **arguments)
        for one in loaded
        if not one.unavailable and hasattr(one.provider, operator)
    }


def forward(contest: Contest, function: Function) -> Tensors:
    """The output."""
    with torch.no_grad():
        return {"output": function(**contest.tensors)}


def backward(contest: Contest, function: Function) -> Tensors:
    """The output and the gradients."""
    return _differentiate(contest, function, create_graph=False)


def double_backward(contest: Contest, function: Function) -> Tensors:
    """The output, the gradients, and the gradients of these along a cotangent of ones."""
    return _differentiate(contest, function, create_graph=True)


TASKS = {"forward": forward, "forward + backward": backward, "+ double backward": double_backward}


def _differentiate(contest: Contest, function: Function, create_graph: bool) -> Tensors:
    leaves = {
        name: tensor.detach().requires_grad_(name in contest.differentiated)
        for name, tensor in contest.tensors.items()
    }
    names = contest.differentiated
    out = function(**leaves)
    cotangent = (
        torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape).requires_grad_(create_graph)
    )
    by = [leaves[name] for name in names]
    gradients = torch.autograd.grad(out, by, cotangent, create_graph=create_graph, allow_unused=True)
    found: dict[str, Tensor | None] = {
        f"grad:{name}": gradient for name, gradient in zip(names, gradients, strict=True)
    }
    if create_graph:
        paired = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
        if not paired:
            raise NotImplementedError("its gradients can't be differentiated")
        torch.autograd.backward([gradient.sum() for gradient in paired])
        found |= {f"gradgrad:{name}": leaves[name].grad for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def disagreements(contest: Contest, task: str) -> dict[str, str]:
    """What contestants have to say instead of the reference's results, which are wanted in float64.

    Raises AssertionError when one gives other results than the reference.
    """
    compute = TASKS[task]
    wide = replace(contest, tensors={name: tensor.double() for name, tensor in contest.tensors.items()})
    expected = compute(wide, contest.contestants[REFERENCE])
    refusals: dict[str, str] = {}
    for name, function in contest.contestants.items():
        try:
            found = compute(wide, function)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            refusals[name] = " ".join(str(error).split())[:80]
            continue
        torch.testing.assert_close(found, expected, msg=functools.partial("{}: {}".format, name))
    return refusals


def run(contest: Contest, task: str, threads: int, rounds: int) -> Iterator[Row]:
    """Times the contestants in turn, round by round, after one round that doesn't count.

    Raises AssertionError when they disagree.
    """
    torch.set_num_threads(threads)
    refusals = disagreements(contest, task)
    entrants = {**contest.contestants, **contest.floors}
    seconds: dict[str, list[float]] = {name: [] for name in entrants if name not in refusals}
    for _ in range(1 + rounds):
        for name, times in seconds.items():
            started = time.perf_counter()
            TASKS[task](contest, entrants[name])
            times.append(time.perf_counter() - started)
    dtype = str(contest.tensors["input"].dtype).removeprefix("torch.")
    for name in entrants:
        times = seconds.get(name, [math.nan])[1:]
        ratios = [mine / theirs for mine, theirs in zip(times, seconds[REFERENCE][1:], strict=False)]
        yield Row(
            contest.operator,
            contest.shape,
            dtype,
            threads,
            task,
            name,
            1000 * statistics.median(times or [math.nan]),
            statistics.median(ratios or [math.nan]),
            refusals.get(name, ""),
        )

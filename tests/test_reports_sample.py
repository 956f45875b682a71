"""A synthetic run that looks like a real one, and the check that it does.

`python tests/test_reports_sample.py ROOT` writes it as a run folder, to look at its report.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from typing import Any

from reports import render
from reports.record import Element, Record, Status
from reports.store import RunFolder

VERSIONS = {"reference": "0.1.0", "composite": "0.1.0", "torchvision": "0.29.1", "mmcv": "2.2.0"}
BOUNDARIES = [
    *("interior", "integer", "last_pixel", "rim", "edge_low", "outside", "zero", "non_finite"),
    *("below_integer_ulp", "above_integer_ulp", "below_integer_nano"),
]
GRADIENTS = {
    "deform_conv2d": ["input", "offset", "mask", "weight", "bias"],
    "roi_align": ["input"],
    "deform_conv2d_pack": ["input", "weight", "conv_offset.weight", "conv_offset.bias"],
    "modulated_deform_conv2d_pack": ["input", "weight", "bias", "conv_offset.weight", "conv_offset.bias"],
}
REFUSAL = {
    "torchvision": "derivative for torchvision::_{operator}_backward is not implemented",
    "mmcv": "trying to differentiate twice a function that was marked with @once_differentiable",
}
LEDGER = {
    "torchvision-edge-closed": {
        "reason": "The offset gradient at y == -1 takes the closed interval: it is the first pixel, not 0.",
        "link": "https://github.com/pytorch/vision/issues/6885",
    },
    "mmcv-cpu-layout": {
        "reason": "The CPU kernel reads strided and channels_last inputs as if they were contiguous.",
        "link": "",
    },
    "mmcv-cpu-float32-floor": {
        "reason": "In float64 coordinates are floored in float32: just below an integer the cell is wrong.",
        "link": "",
    },
}


def record(**changes: Any) -> Record:
    """A match of the reference, with changes."""
    fields: dict[str, Any] = {
        "case": "deform_conv2d-n2c4h5w6-k3x3-interior-float32",
        "operator": "deform_conv2d",
        "provider": "reference",
        "version": "0.1.0",
        "device": "cpu",
        "dtype": "float32",
        "boundary": "interior",
        "question": "output",
        "quantity": "output",
        "status": Status.MATCH,
        "err_over_bound": 0.25,
        "rms_over_bound": 0.1,
        "max_abs_error": 1e-6,
        "max_ulp_error": 2.0,
        "elements": 96,
        "tested": 96,
        "seconds": 0.001,
    }
    return Record(**{**fields, **changes})


def elements(draw: random.Random, boundary: str, scale: float, count: int = 8) -> tuple[Element, ...]:
    """Worst elements, the worst first, with one sample for a few and many for the others."""
    where = {"edge_low": -1.0, "below_integer_nano": 2 - 1e-13, "outside": -1.75, "non_finite": math.nan}.get(
        boundary, 1.5
    )
    found = []
    for number in range(count):
        expected = draw.uniform(-4, 4)
        found.append(
            Element(
                (draw.randrange(2), draw.randrange(18), draw.randrange(5), draw.randrange(6)),
                expected,
                math.nan if boundary == "non_finite" else expected * (1 + scale * 1e-7),
                scale / (number + 1),
                tuple((where, float(x), boundary) for x in range(1 + 6 * (number % 2))),
            )
        )
    return tuple(found)


def _verdict(
    provider: str, operator: str, layout: str, dtype: str, boundary: str, quantity: str
) -> dict[str, Any]:
    """What a provider does on a case: what the released versions show, and more."""
    deform = operator != "roi_align"
    if provider == "torchvision":
        if deform and boundary == "edge_low" and "offset" in quantity:
            return {"status": Status.CONVENTION, "convention": "closed", "ledger": "torchvision-edge-closed"}
        if operator == "roi_align" and boundary == "non_finite":
            return {
                "status": Status.CRASHED,
                "message": "the process died with signal 11 (SIGSEGV)",
                "tested": 0,
            }
    if provider == "mmcv" and deform:
        if layout != "contiguous":
            if boundary == "outside" and quantity == "grad:input":
                crash = {"message": "the process died of SIGSEGV", "tested": 0, "elements": 0}
                return {"status": Status.CRASHED, "ledger": "mmcv-cpu-layout", **crash}
            return {"status": Status.KNOWN, "ledger": "mmcv-cpu-layout"}
        if dtype == "float64" and boundary == "below_integer_nano":
            return {"status": Status.KNOWN, "ledger": "mmcv-cpu-float32-floor"}
        if boundary == "non_finite" and quantity in ("output", "grad:offset"):
            return {"status": Status.DEFECT, "message": "0 where the oracle has NaN | <b>both</b> backends"}
    if provider == "composite" and quantity == "grad:mask" and boundary == "outside":
        return {"status": Status.VACUOUS, "tested": 0, "err_over_bound": 0.0}
    if provider == "composite" and dtype == "bfloat16" and quantity == "grad:weight":
        return {"status": Status.DRIFT, "message": "err/bound 0.81, ten times the baseline's 0.07"}
    return {}


def sample(seed: int = 0) -> list[Record]:
    """About 6000 records of 4 providers, statuses of all kinds but unavailable."""
    draw = random.Random(seed)
    found = []
    grid = itertools.product(
        GRADIENTS, BOUNDARIES, ["contiguous", "channels_last"], ["float64", "float32", "bfloat16"], VERSIONS
    )
    for operator, boundary, layout, dtype, provider in grid:
        case = f"{operator}-n2c4h5w6-k3x2-s2x1-p1x0-{layout}-{dtype}-{boundary}"
        gradients = GRADIENTS[operator]
        asked = [("output", "output"), *(("gradients", f"grad:{name}") for name in gradients)]
        if dtype == "float64":
            asked += [("double_backward", f"gradgrad:{name}") for name in gradients]
            if layout == "contiguous":
                asked += [("gradcheck", "grad"), ("gradgradcheck", "gradgrad")]
        for question, quantity in asked:
            changes: dict[str, Any] = {
                "err_over_bound": min(draw.lognormvariate(-2, 0.6), 0.97),
                "elements": 720,
                "tested": 720,
                **_verdict(provider, operator, layout, dtype, boundary, quantity),
            }
            if question in ("double_backward", "gradgradcheck") and provider in REFUSAL:
                message = REFUSAL[provider].format(operator=operator)
                changes = {"status": Status.UNSUPPORTED, "message": message, "err_over_bound": math.nan}
            elif changes.get("status") == Status.CRASHED or "check" in question:
                changes["err_over_bound"] = math.nan
            elif changes.get("status") in (Status.KNOWN, Status.DEFECT, Status.CONVENTION):
                scale = math.inf if boundary == "non_finite" else draw.lognormvariate(9, 2)
                changes |= {"err_over_bound": scale, "worst": elements(draw, boundary, scale)}
            place = {"case": case, "operator": operator, "boundary": boundary, "dtype": dtype}
            asks = {
                "provider": provider,
                "version": VERSIONS[provider],
                "question": question,
                "quantity": quantity,
            }
            found.append(record(**place, **asks, **changes))
    slow = record(provider="mmcv", version="2.2.0", status=Status.TIMED_OUT, err_over_bound=math.nan)
    hungry = record(provider="mmcv", version="2.2.0", status=Status.OUT_OF_MEMORY, err_over_bound=math.nan)
    return [*found, slow, hungry]


def description() -> dict[str, Any]:
    """What the run of `sample` says of itself."""
    return {
        "tier": "default",
        "command": "pytest conformance/ --tier default -n 2",
        "started": "2026-11-30T21:05:12+00:00",
        "finished": "2026-11-30T21:09:47+00:00",
        "versions": {"gradparity": "0.1.0", "python": "3.11.2", "torch": "2.14.1", "torchvision": "0.29.1"},
        "machine": {"system": "Linux 6.1 x86_64", "processor": "2 cores, AVX2", "compiler": "g++ 12.2.0"},
        "providers": [
            *(
                {"name": name, "version": VERSIONS[name], "available": True, "reason": ""}
                for name in VERSIONS
            ),
            {"name": "paddle", "version": "", "available": False, "reason": "paddlepaddle is not installed"},
        ],
        "not_compared": ["no CUDA device: nothing was compared on cuda"],
        "ledger": LEDGER,
        "stale_ledger": [],
    }


def test_the_sample_is_like_a_run() -> None:
    records = sample()
    assert 5000 < len(records) < 8000
    assert {each.status for each in records} == set(Status) - {Status.UNAVAILABLE}
    assert {each.provider for each in records} == set(VERSIONS)


if __name__ == "__main__":
    with RunFolder.create(sys.argv[1]) as folder:
        folder.append("all", sample())
        folder.tabulate(description())
    print(render.write_report(folder.path))

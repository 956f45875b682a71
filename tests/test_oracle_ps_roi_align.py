"""The oracle of ps_roi_align against explicit sums: two derivations, one answer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_oracle_roi_align import assert_oracle_is_explicit

from cases.operator import Arithmetic
from cases.operators.ps_roi_align import OPERATOR, PSRoIAlignCase
from cases.operators.roi_align import BOXES

SMALL = PSRoIAlignCase(dtype="float64", size=(4, 5), channels=2, rois=5)


@pytest.mark.parametrize("boxes", BOXES)
def test_boxes(boxes: str) -> None:
    assert_oracle_is_explicit(dataclasses.replace(SMALL, boxes=boxes), position_sensitive=True)


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("sampling_ratio", [0, 1, 3])
def test_grids_and_scales(sampling_ratio: int, scale: int) -> None:
    for boxes in ("interior", "empty", "inverted"):
        changed = {"boxes": boxes, "sampling_ratio": sampling_ratio, "scale": scale, "output_size": (3, 2)}
        case = dataclasses.replace(SMALL, dtype="float32", **changed)  # type: ignore[arg-type]
        assert_oracle_is_explicit(case, position_sensitive=True)


def test_every_bin_reads_its_own_channel() -> None:
    case = PSRoIAlignCase(dtype="float64", batch=1, size=(3, 3), rois=1, channels=2, output_size=(2, 3))
    image = torch.arange(12.0).double().reshape(1, 12, 1, 1).expand(1, 12, 3, 3)
    rois = torch.tensor([[0, 0.5, 0.5, 2.5, 2.5]]).double()
    pooled = OPERATOR.oracle(case, {"input": image, "rois": rois}, Arithmetic.SIGNED, "closed")
    assert pooled.flatten().tolist() == pytest.approx(list(range(12)), abs=1e-12)


def test_an_adaptive_bin_without_samples_is_zero() -> None:
    case = PSRoIAlignCase(batch=1, rois=1, channels=1, output_size=(1, 1), boxes="empty", sampling_ratio=0)
    expectation = assert_oracle_is_explicit(case, position_sensitive=True)
    assert expectation.output("closed")["output"].value.item() == 0

"""Ids name their case, and inputs come from the id alone."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_cases_sweep import cases_of

from cases.case import Case
from cases.operator import Arithmetic, all_operators, parse_case
from cases.operators.deform_conv2d import DeformConv2dCase

ROOT = Path(__file__).parent.parent

DRAWN = [
    "deform_conv2d/dtype=float64,groups=2,offsets=mixed,layout=sliced",
    "deform_conv2d/dtype=bfloat16,batch=3,offsets=below_integer_ulp",
    "roi_align/dtype=float16,boxes=beyond",
    "roi_align_max/output_size=7x7,boxes=beyond",
    "ps_roi_pool/dtype=float64,boxes=below_half_nano",
    "modulated_deform_conv2d_pack/offsets=mixed",
]

PRINT_DIGESTS = """
import sys
sys.path[0:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from test_cases_ids import digest
print("\\n".join(map(digest, sys.argv[2:])))
"""


def digest(case_id: str) -> str:
    """A hash of every bit of a case's inputs and grad_output."""
    case = parse_case(case_id)
    operator = all_operators()[case.operator]
    tensors = operator.sample(case)
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    output = operator.oracle(case, wide, Arithmetic.SIGNED, "open")
    tensors["grad_output"] = operator.cotangent(case, output)
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        found.update(tensors[name].double().contiguous().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("tier", ["smoke", "default"])
def test_every_id_parses_back_to_its_case(tier: str) -> None:
    cases = cases_of(tier)
    assert [parse_case(case.id) for case in cases] == cases
    assert len({case.id for case in cases}) == len(cases) == len(set(cases))
    assert all(case.id.isascii() and " " not in case.id and "'" not in case.id for case in cases)


def test_an_id_says_what_differs_from_the_default() -> None:
    assert DeformConv2dCase().id == "deform_conv2d/default"
    assert parse_case("deform_conv2d/default") == DeformConv2dCase()
    case = DeformConv2dCase(batch=33, padding=(1, 0), mask=False, dtype="float64", offsets="edge_low")
    assert case.id == "deform_conv2d/dtype=float64,batch=33,padding=1x0,mask=no,offsets=edge_low"
    assert str(case) == case.id


def test_every_axis_of_every_operator_is_in_the_id() -> None:
    for operator in all_operators().values():
        for axis in dataclasses.fields(operator.case_type):
            for value in operator.axes.get(axis.name, ()):
                changed: Case = operator.case_type(**{axis.name: value})
                assert (changed.id == operator.case_type().id) == (value == axis.default)
                assert value == axis.default or f"{axis.name}=" in changed.id


@pytest.mark.parametrize(
    ("case_id", "sentence"),
    [
        ("deform_conv2d", "expected OPERATOR/AXES with one of"),
        ("", "expected OPERATOR/AXES"),
        ("conv2d/default", "expected OPERATOR/AXES with one of deform_conv2d"),
        ("deform_conv2d/", "is not AXIS=VALUE"),
        ("deform_conv2d/batch", "'batch' is not AXIS=VALUE"),
        ("deform_conv2d/batches=3", "'batches=3' is not AXIS=VALUE with one of the axes dtype"),
        ("deform_conv2d/id=3", "is not AXIS=VALUE"),
        ("deform_conv2d/batch=many", "'many' is not a value of type"),
        ("deform_conv2d/batch=", "'' is not a value"),
        ("deform_conv2d/batch=3.0", "'3.0' is not a value"),
        ("deform_conv2d/mask=true", "'true' is not a value of type"),
        ("deform_conv2d/size=5", "'5' is not a value"),
        ("deform_conv2d/size=5x6x7", "'5x6x7' is not a value"),
        ("deform_conv2d/batch=3,batch=3", "axis 'batch' stands twice"),
        ("deform_conv2d/batch=3,dtype=float64", "is written deform_conv2d/dtype=float64,batch=3"),
        ("deform_conv2d/batch=03", "is written deform_conv2d/batch=3"),
        ("deform_conv2d/batch= 3", "is written deform_conv2d/batch=3"),
        ("deform_conv2d/batch=2", "is written deform_conv2d/default"),
        ("deform_conv2d/dtype=int8", "dtype is 'int8', expected one of float64"),
        ("deform_conv2d/data=zeros", "data is 'zeros', expected one of"),
        ("deform_conv2d/offsets=nowhere", "offsets is 'nowhere', expected one of"),
        ("deform_conv2d/groups=3", "in_channels is not a multiple of groups"),
        ("deform_conv2d/in_channels=6,out_channels=5,groups=2", "out_channels is not a multiple"),
        ("deform_conv2d/size=1x1,kernel=4x4", "the output would be (0, 0)"),
        ("deform_conv2d/offsets=inside_edge_nano", "only float64 tells 1e-9"),
        ("deform_conv2d/data=integer,offsets=inside_edge_ulp", "no offsets in quarters"),
        ("deform_conv2d/size=1x1,padding=2x2", "has no such coordinates"),
        ("deform_conv2d_pack/mask=yes", "the mask is what tells"),
        ("deform_conv2d_pack/dtype=float16", "the predicted offsets are exact"),
        ("roi_align/boxes=round", "boxes is 'round', expected one of"),
        ("roi_align/boxes=half", "boxes is 'half', expected one of"),
        ("roi_align/data=integer,scale=3", "a power of two places samples exactly"),
        ("roi_pool/scale=3,boxes=half", "a power of two places samples exactly"),
        ("roi_pool/boxes=edge_low", "boxes is 'edge_low', expected one of"),
        ("roi_pool/boxes=below_half_nano", "only float64 tells 1e-9"),
        ("roi_pool/dtype=float16,boxes=huge", "float16 has no such coordinates"),
        ("ps_roi_pool/boxes=nan_pixels", "boxes is 'nan_pixels', expected one of"),
        ("ps_roi_align/scale=0", "scale is a positive integer"),
        ("roi_align/output_size=0x1", "at least one pixel"),
        ("deform_conv2d/layout=diagonal", "layout"),
        ("deform_conv2d/grad_layout=diagonal", "layout"),
        ("deform_conv2d/batch=-1", "batch"),
        ("deform_conv2d/stride=0x1", "stride"),
        ("deform_conv2d/dilation=0x1", "dilation"),
        ("deform_conv2d/kernel=0x1", "kernel"),
        ("deform_conv2d/padding=-1x0", "padding"),
        ("deform_conv2d/groups=0", "groups"),
        ("deform_conv2d/in_channels=0", "in_channels"),
        ("deform_conv2d/out_channels=-4", "out_channels"),
        ("deform_conv2d/size=0x5", "size"),
        ("roi_align/rois=-1", "rois"),
        ("roi_align/channels=0", "channels"),
        ("roi_align/sampling_ratio=-1", "sampling_ratio"),
        ("roi_align/layout=diagonal", "layout"),
    ],
)
def test_other_text_is_refused_with_a_sentence(case_id: str, sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the text is compared below, verbatim
        parse_case(case_id)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_cases_are_hashable_and_frozen() -> None:
    case = DeformConv2dCase(batch=3)
    assert {case: 1}[DeformConv2dCase(batch=3)] == 1
    assert pickle.loads(pickle.dumps(case)) == case
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.batch = 4  # type: ignore[misc]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_inputs_come_from_the_id_alone(hash_seed: str) -> None:
    torch.manual_seed(7)
    here = [digest(case_id) for case_id in DRAWN]
    torch.manual_seed(8)
    assert [digest(case_id) for case_id in reversed(DRAWN)] == here[::-1]
    command = [sys.executable, "-c", PRINT_DIGESTS, str(ROOT), *DRAWN]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    there = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=True)
    assert there.stdout.split() == here


def test_different_ids_and_streams_draw_different_values() -> None:
    case = DeformConv2dCase()
    draws = {
        case.generator().random(),
        case.generator("grad_output").random(),
        dataclasses.replace(case, layout="sliced").generator().random(),
    }
    assert len(draws) == 3
    assert case.generator().random() == DeformConv2dCase().generator().random()


def test_grad_output_is_not_constant() -> None:
    for operator in all_operators().values():
        case = operator.case_type()
        grad = operator.cotangent(case, torch.zeros(2, 4, 5, 6))
        assert len(set(grad.flatten().tolist())) > 20

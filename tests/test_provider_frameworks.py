"""Other frameworks: their files say clearly what they can't do, sort boxes and bring them back, and compute."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conformance.providers.frameworks as package
from conformance.providers.frameworks import _arrays, _onnx_graph
from conformance.providers.frameworks.ncnn import Ncnn
from conformance.providers.frameworks.onnx_reference import OnnxReference
from conformance.providers.frameworks.openvino import OpenVino
from conformance.providers.frameworks.paddle import Paddle, _without_last_pixel
from conformance.providers.protocol import Operators

FOLDER = Path(package.__path__[0])
FILES = sorted(FOLDER.glob("*.py"))
# The frameworks by the name of their file, and what they import.
IMPORTS = {
    "ncnn": ("ncnn",),
    "onnx_reference": ("onnx",),
    "onnxruntime": ("onnx", "onnxruntime"),
    "openvino": ("openvino",),
    "paddle": ("paddle",),
    "reference_exported": ("onnxruntime", "onnxscript", "onnx"),
    "torchvision_exported": ("onnxruntime", "onnxscript", "onnx", "torchvision"),
}
KINDS = sorted(IMPORTS)
NO_SHIFT = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}


def provider(kind: str) -> Any:
    """The provider of a file, whether it can be loaded or not."""
    return importlib.import_module(f"{package.__name__}.{kind}").PROVIDER


def loaded(kind: str, operator: str) -> Any:
    """The provider, ready; skips when its framework is not installed or lacks the operator."""
    for name in IMPORTS[kind]:
        pytest.importorskip(name)
    found = provider(kind)
    if operator not in found.operators:
        pytest.skip(f"{kind} has no {operator}")
    found.load()
    return found


def image(*shape: int) -> np.ndarray:
    """Pixels 0, 1, 2, ..."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def roi_case(
    boxes: list[list[float]], batch: int = 1, channels: int = 1, **arguments: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Boxes on images of 5 x 6 pixels, pooled to one bin."""
    arrays = {"input": image(batch, channels, 5, 6), "rois": np.array(boxes, np.float32)}
    return arrays, {"output_size": (1, 1), "spatial_scale": 1.0, **arguments}


def deform_case(groups: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """A kernel of one tap that reads one pixel to the right."""
    offset = np.zeros((1, 2, 5, 6), np.float32)
    offset[:, 1] = 1
    weight = np.ones((2, 2 // groups, 1, 1), np.float32)
    arrays = {"input": image(1, 2, 5, 6), "offset": offset, "weight": weight, "bias": None, "mask": None}
    return arrays, NO_SHIFT


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_need_numpy_alone_on_python_3_9(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 9))
    imported = set()
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            imported |= {name.name.partition(".")[0] for name in statement.names}
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            imported.add(str(statement.module).partition(".")[0])
    assert imported <= {*sys.stdlib_module_names, "numpy"}


def test_every_file_is_tested() -> None:
    assert [file.stem for file in FILES if not file.stem.startswith("_")] == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_operators_are_the_projects(kind: str) -> None:
    found = provider(kind)
    assert found.name == kind
    assert found.operators
    assert all(hasattr(Operators, operator) for operator in found.operators)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_framework_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IMPORTS[kind]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=IMPORTS[kind][0]):
        provider(kind).load()


def test_groups_follow_from_the_shapes() -> None:
    arrays = {
        "input": np.zeros((1, 12, 5, 5)),
        "offset": np.zeros((1, 24, 5, 5)),
        "weight": np.zeros((4, 3, 3, 1)),
    }
    assert _arrays.groups(arrays) == (4, 4)


def test_boxes_are_sorted_by_image_and_brought_back() -> None:
    rois = np.array([[2, 0, 0, 1, 1], [0, 1, 1, 2, 2], [2, 3, 3, 4, 4], [0, 5, 5, 6, 6]], np.float32)
    boxes = _arrays.by_image(rois, 4)
    assert boxes.counts.tolist() == [2, 0, 2, 0]
    assert boxes.corners[:, 0].tolist() == [1, 5, 0, 3]
    assert boxes.sort(rois)[:, 0].tolist() == [0, 0, 2, 2]
    assert np.array_equal(boxes.unsort(boxes.sort(rois)), rois)
    assert np.array_equal(boxes.unsort(boxes.corners), rois[:, 1:])


def test_no_boxes_are_no_boxes() -> None:
    boxes = _arrays.by_image(np.zeros((0, 5), np.float32), 2)
    assert boxes.counts.tolist() == [0, 0]
    assert boxes.unsort(np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize(("number", "said"), [(2, "images 0 to 1"), (-1, "images 0 to 1"), (0.5, "number")])
def test_a_box_of_no_image_is_refused(number: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _arrays.by_image(np.array([[number, 0, 0, 1, 1]], np.float32), 2)


@pytest.mark.parametrize(
    ("found", "dtype", "said"),
    [
        (OpenVino(), np.float64, "openvino's CPU plugin computes float32 and float16 here, not float64"),
        (Paddle(), np.float16, "paddle on CPU computes float64 and float32 here, not float16"),
        (Ncnn(), np.float64, "ncnn computes float32 here, not float64"),
    ],
    ids=["openvino", "paddle", "ncnn"],
)
def test_other_dtypes_are_refused(found: Any, dtype: Any, said: str) -> None:
    arrays, arguments = roi_case([[0, 1, 1, 3, 3]], sampling_ratio=1, aligned=True)
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    with pytest.raises(NotImplementedError, match=said):
        found.output("roi_align", arrays, arguments)


def test_scale_that_float32_does_not_hold_is_refused_for_float64_alone() -> None:
    wide, narrow = {"input": np.zeros(1)}, {"input": np.zeros(1, np.float32)}
    _arrays.require_held_scale("ONNX", wide, 0.25)
    _arrays.require_held_scale("ONNX", narrow, 1 / 3)
    with pytest.raises(NotImplementedError, match="ONNX keeps spatial_scale in float32"):
        _arrays.require_held_scale("ONNX", wide, 1 / 3)


def test_ncnn_refuses_groups() -> None:
    with pytest.raises(NotImplementedError, match=r"one group and one offset group, not \(2, 1\)"):
        Ncnn().output("deform_conv2d", *deform_case(groups=2))


def test_the_reference_evaluator_refuses_what_takes_minutes() -> None:
    arrays, arguments = deform_case()
    arrays["weight"] = np.ones((10000, 2, 1, 1), np.float32)
    with pytest.raises(NotImplementedError, match="600000 samples"):
        OnnxReference().output("deform_conv2d", arrays, arguments)


def test_psroi_pool_has_the_last_pixel_and_no_scale() -> None:
    corners = np.array([[1, 2, 3, 4.5]], np.float32)
    assert _without_last_pixel(corners, 1).tolist() == [[1, 2, 2, 3.5]]
    with pytest.raises(NotImplementedError, match="before it scales"):
        _without_last_pixel(corners, 0.5)
    with pytest.raises(NotImplementedError, match=r"ends at 0\.5"):
        _without_last_pixel(np.array([[0, 0, 0.5, 1]], np.float32), 1)


def test_onnx_attributes() -> None:
    arrays, arguments = roi_case([[0, 1, 1, 3, 3]], sampling_ratio=0, aligned=False)
    attributes = _onnx_graph.attributes("roi_align_max", arrays, arguments)
    assert attributes["coordinate_transformation_mode"] == "output_half_pixel"
    assert (attributes["mode"], attributes["sampling_ratio"]) == ("max", 0)
    arrays, _ = deform_case(groups=2)
    given = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 3)}
    attributes = _onnx_graph.attributes("deform_conv2d", arrays, given)
    assert attributes["pads"] == [1, 0, 1, 0]
    assert (attributes["group"], attributes["offset_group"]) == (2, 1)


def test_onnx_inputs_stand_in_their_order() -> None:
    arrays, _ = deform_case()
    arrays["mask"] = np.ones((1, 1, 5, 6), np.float32)
    fed = _onnx_graph.feeds("deform_conv2d", arrays)
    assert list(fed) == ["input", "weight", "offset", "bias", "mask"]
    assert fed["bias"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_deform_conv2d(kind: str) -> None:
    arrays, arguments = deform_case()
    expected = np.zeros((1, 2, 5, 6))
    expected[..., :-1] = arrays["input"][..., 1:].sum(1, keepdims=True)
    assert np.array_equal(loaded(kind, "deform_conv2d").output("deform_conv2d", arrays, arguments), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aligned", [True, False])
def test_roi_align(kind: str, aligned: bool) -> None:
    arrays, arguments = roi_case(
        [[1, 2, 1, 4, 3], [0, 1, 1, 3, 3], [1, 1, 1, 3, 3]], batch=2, sampling_ratio=1, aligned=aligned
    )
    centre = 6 * 2 + 2 - (3.5 if aligned else 0)
    expected = np.array([30 + centre + 1, centre, 30 + centre]).reshape(3, 1, 1, 1)
    assert np.array_equal(loaded(kind, "roi_align").output("roi_align", arrays, arguments), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_arrays_are_read_as_they_are(kind: str) -> None:
    arrays, arguments = roi_case([[0, 1, 1, 3, 3]], channels=5, sampling_ratio=1, aligned=False)
    strided = {name: array.T.copy().T for name, array in arrays.items()}
    found = loaded(kind, "roi_align")
    expected = [30 * channel + 14 for channel in range(5)]
    assert found.output("roi_align", strided, arguments).ravel().tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_roi_pool(kind: str) -> None:
    arrays, arguments = roi_case([[1, 0, 1, 1, 2], [0, 3, 3, 9, 3]], batch=2)
    output = loaded(kind, "roi_pool").output("roi_pool", arrays, arguments)
    assert output.ravel().tolist() == [30 + 6 * 2 + 1, 6 * 3 + 5]


@pytest.mark.parametrize("kind", KINDS)
def test_ps_roi_pool(kind: str) -> None:
    arrays, arguments = roi_case([[1, 0, 1, 2, 3], [0, 3, 3, 5, 4]], batch=2, channels=2)
    output = loaded(kind, "ps_roi_pool").output("ps_roi_pool", arrays, arguments)
    assert output.ravel().tolist() == [69.5, 99.5, 21.5, 51.5]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if hasattr(provider(kind), "gradients")])
def test_gradients_belong_to_the_boxes_in_their_own_order(kind: str) -> None:
    arrays, arguments = roi_case([[1, 2, 1, 4, 3], [0, 1, 1, 3, 3]], batch=2, sampling_ratio=1, aligned=False)
    cotangent = np.array([5, 7], np.float32).reshape(2, 1, 1, 1)
    found = loaded(kind, "roi_align").gradients("roi_align", arrays, arguments, cotangent, ["input"])
    expected = np.zeros((2, 1, 5, 6))
    expected[1, 0, 2, 3], expected[0, 0, 2, 2] = 5, 7
    assert np.array_equal(found["input"], expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if hasattr(provider(kind), "gradients")])
def test_gradients_of_deform_conv2d(kind: str) -> None:
    arrays, arguments = deform_case()
    found = loaded(kind, "deform_conv2d").gradients(
        "deform_conv2d", arrays, arguments, np.ones((1, 2, 5, 6), np.float32), ["weight", "offset"]
    )
    assert found["weight"].ravel().tolist() == [arrays["input"][0, c, :, 1:].sum() for c in (0, 1)] * 2
    # The pixel to the right minus the pixel itself is 1 in both channels, which both outputs read.
    assert np.array_equal(found["offset"][0, 1, :, :4], np.full((5, 4), 4.0))

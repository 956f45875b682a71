"""Export to ONNX: the graphs are one node of the operator, and compute what the kernels do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kernels
from kernels.onnx import translation_table

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def export(model: nn.Module, *inputs: Tensor | None, **options: Any) -> Any:
    """The exported model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            inputs,
            custom_translation_table=translation_table(),
            dynamo=True,
            verbose=False,
            **options,
        )
    assert program is not None
    return program.model_proto


def run(graph: Any, *inputs: Tensor) -> Tensor:
    """The graph's output by ONNX Runtime."""
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    fed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, fed)[0])


def node_types(graph: Any) -> list[str]:
    """The types of the graph's nodes."""
    return [node.op_type for node in graph.graph.node]


class Align(nn.Module):
    """roi_align with fixed settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, input: Tensor, boxes: Tensor) -> Tensor:
        """The pooled boxes."""
        return kernels.roi_align(input, boxes, (2, 3), **self.settings)


def draw(*sizes: int) -> Tensor:
    """Reals from a fixed seed."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("masked", [True, False])
def test_deform_conv2d(masked: bool) -> None:
    layer = kernels.DeformConv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
    inputs = (draw(2, 4, 5, 6), draw(2, 24, 3, 4), *([draw(2, 12, 3, 4).sigmoid()] if masked else []))
    graph = export(layer, *inputs)
    assert node_types(graph) == ["DeformConv"]
    torch.testing.assert_close(run(graph, *inputs), layer(*inputs).detach())


def test_pack() -> None:
    layer = kernels.ModulatedDeformConv2dPack(4, 2, 3, padding=1, deform_groups=2)
    nn.init.normal_(layer.conv_offset.weight, std=0.1)
    image = draw(2, 4, 5, 6)
    graph = export(layer, image)
    assert node_types(graph).count("DeformConv") == 1
    torch.testing.assert_close(run(graph, image), layer(image).detach())


def test_deform_conv2d_of_any_batch_and_size() -> None:
    layer = kernels.DeformConv2d(2, 2, 3, padding=1)
    batch, height, width = (torch.export.Dim(name) for name in ("batch", "height", "width"))
    dynamic = {0: batch, 2: height, 3: width}
    graph = export(layer, draw(2, 2, 5, 6), draw(2, 18, 5, 6), dynamic_shapes=(dynamic, dynamic))
    other = draw(3, 2, 7, 4), draw(3, 18, 7, 4)
    torch.testing.assert_close(run(graph, *other), layer(*other).detach())


def test_dynamic_channels_are_refused() -> None:
    class Layer(nn.Module):
        def forward(self, input: Tensor, offset: Tensor, weight: Tensor) -> Tensor:
            return kernels.deform_conv2d(input, offset, weight)

    inputs = draw(1, 2, 4, 4), draw(1, 2, 4, 4), draw(3, 2, 1, 1)
    channels = torch.export.Dim("channels", min=2)
    with pytest.raises(torch.onnx.OnnxExporterError, match="axis 1 is dynamic"):
        export(Layer(), *inputs, dynamic_shapes=({1: channels}, None, {1: channels}))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sampling_ratio", [-1, 0, 2])
def test_roi_align(aligned: bool, sampling_ratio: int) -> None:
    settings = {"spatial_scale": 0.5, "sampling_ratio": sampling_ratio, "aligned": aligned}
    boxes = torch.tensor([[1, 1.2, 2.4, 9.1, 12.3], [0, -3, 1, 4, 5]])
    image = draw(2, 3, 7, 9)
    graph = export(Align(**settings), image, boxes)
    assert node_types(graph).count("RoiAlign") == 1
    torch.testing.assert_close(run(graph, image, boxes), kernels.roi_align(image, boxes, (2, 3), **settings))


def test_modes_without_translation_are_refused() -> None:
    with pytest.raises(torch.onnx.OnnxExporterError, match="roi_align_max"):
        export(Align(mode="max", aligned=True), draw(1, 1, 4, 4), torch.tensor([[0.0, 1, 1, 3, 3]]))

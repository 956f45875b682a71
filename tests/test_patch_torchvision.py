"""patch_torchvision: what it covers, what it changes, and that nothing is left of it after its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import kernels
from kernels import patch_torchvision, torchvision_patch

pytest.importorskip("torchvision")
# Imported before any patch, as in anybody's code.
from torchvision.ops import (
    DeformConv2d,
    RoIAlign,
    deform_conv2d,
    ps_roi_align,
    ps_roi_pool,
    roi_align,
    roi_pool,
)

ROIS = torch.tensor([[0, 1.0, 1, 6, 7], [1, 2, 0.3, 5, 5], [1, -3, 0, 8, 20]], dtype=torch.float64)


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


IMAGE, OFFSET, WEIGHT = draw(2, 4, 7, 6), draw(2, 18, 7, 6), draw(6, 2, 3, 3)

# The same operator by torchvision and by the kernels, as a function of the named tensor alone.
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor]] = {
    "deform_conv2d by image": (
        lambda image: deform_conv2d(image, OFFSET, WEIGHT, padding=1),
        lambda image: kernels.deform_conv2d(image, OFFSET, WEIGHT, padding=1),
        IMAGE,
    ),
    "deform_conv2d by offset": (
        lambda offset: deform_conv2d(IMAGE, offset, WEIGHT, padding=(1, 1), mask=offset[:, :9].sigmoid()),
        lambda offset: kernels.deform_conv2d(IMAGE, offset, WEIGHT, padding=1, mask=offset[:, :9].sigmoid()),
        OFFSET,
    ),
    "deform_conv2d by weight": (
        lambda weight: deform_conv2d(
            IMAGE[:, :, ::2], OFFSET[..., 2:4, 1:5], weight, weight[:, 0, 0, 0], (1, 2), (1, 2), (2, 1)
        ),
        lambda weight: kernels.deform_conv2d(
            IMAGE[:, :, ::2], OFFSET[..., 2:4, 1:5], weight, weight[:, 0, 0, 0], (1, 2), (1, 2), (2, 1)
        ),
        WEIGHT,
    ),
    "roi_align": (
        lambda image: roi_align(image, ROIS, (3, 2), 0.9, 2, True),
        lambda image: kernels.roi_align(image, ROIS, (3, 2), 0.9, 2, True),
        IMAGE,
    ),
    "roi_align of a list": (
        lambda image: roi_align(image, [ROIS[:1, 1:], ROIS[1:, 1:]], 2),
        lambda image: kernels.roi_align(image, [ROIS[:1, 1:], ROIS[1:, 1:]], 2),
        IMAGE,
    ),
    "roi_pool": (
        lambda image: roi_pool(image, ROIS, (3, 2), 0.9),
        lambda image: kernels.roi_pool(image, ROIS, (3, 2), 0.9),
        IMAGE,
    ),
    "ps_roi_align": (
        lambda image: ps_roi_align(image, ROIS, (1, 2), 0.9, 2),
        lambda image: kernels.ps_roi_align(image, ROIS, (1, 2), 0.9, 2),
        IMAGE,
    ),
    "ps_roi_pool": (
        lambda image: ps_roi_pool(image, ROIS, (1, 2), 0.9),
        lambda image: kernels.ps_roi_pool(image, ROIS, (1, 2), 0.9),
        IMAGE,
    ),
}

# What torch makes of a function; each is asked of both.
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "value": lambda function, x: function(x),
    "value in inference mode": lambda function, x: torch.inference_mode()(function)(x),
    "gradient": lambda function, x: gradients(function, x, 1),
    "second order": lambda function, x: gradients(function, x, 2),
    "third order": lambda function, x: gradients(function, x, 3),
    "forward mode": lambda function, x: forward_mode(function, x),
    "func.grad": lambda function, x: torch.func.grad(lambda x: function(x).sin().sum())(x),
    "func.jvp": lambda function, x: torch.func.jvp(function, (x,), (x.cos(),)),
    "func.vmap": lambda function, x: torch.func.vmap(function)(torch.stack([x, x.sin()])),
    "func.vmap of grad": lambda function, x: torch.func.vmap(
        torch.func.grad(lambda x: function(x).sin().sum())
    )(torch.stack([x, x.sin()])),
    "func.hessian": lambda function, x: torch.func.hessian(lambda t: function(t * x).square().sum())(
        x.new_ones(())
    ),
}


def gradients(function: Callable[[Tensor], Tensor], x: Tensor, order: int) -> list[Tensor]:
    """The gradients of sin(function) up to this order, each of the sine of the one before."""
    x = x.detach().requires_grad_()
    found = [function(x)]
    for _ in range(order):
        found += torch.autograd.grad(found[-1].sin().sum(), x, create_graph=True)
    return found


def forward_mode(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(function(forward_ad.make_dual(x, x.cos()))))


def assert_equal(found: Any, expected: Any) -> None:
    """Bit for bit: the same kernels run."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def is_patched() -> bool:
    """Whether torchvision can be differentiated twice; without a patch it refuses with its own message."""
    function, _, x = CALLS["roi_align"]
    try:
        gradients(function, x, 2)
    except RuntimeError as error:
        if "double backwards on roi_align not supported" not in str(error):
            raise
        return False
    return True


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    """Every test begins and ends without a patch."""
    assert not is_patched()
    yield
    assert not is_patched()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", CALLS)
def test_torchvision_computes_with_the_kernels(call: str, transform: str) -> None:
    by_torchvision, by_kernels, x = CALLS[call]
    ask = TRANSFORMS[transform]
    expected = ask(by_kernels, x)
    with patch_torchvision():
        assert_equal(ask(by_torchvision, x), expected)


@pytest.mark.parametrize("call", CALLS)
def test_after_its_end_everything_is_as_before(call: str) -> None:
    function, _, x = CALLS[call]
    before = gradients(function, x, 1)
    with patch_torchvision():
        gradients(function, x, 2)
    assert_equal(gradients(function, x, 1), before)
    with pytest.raises(RuntimeError, match=r"double backwards on \w+ not supported"):
        gradients(function, x, 2)


def differentiate_a_convolution_twice() -> None:
    """What pytorch/vision#1982 reports for a DeformConv2d(3, 5, 3, 1, 1)."""
    layer = DeformConv2d(3, 5, 3, 1, 1)
    image = torch.rand(1, 3, 10, 10, requires_grad=True)
    offset = torch.rand(1, 18, 10, 10, requires_grad=True)
    found = torch.autograd.grad(layer(image, offset).sum(), [image, offset], create_graph=True)
    sum(grad.sum() for grad in found).backward()  # type: ignore[union-attr]
    assert layer.weight.grad is not None
    assert offset.grad is not None
    assert bool(offset.grad.any())


def differentiate_a_pooling_twice() -> None:
    """The same for a RoIAlign."""
    image = torch.rand(1, 3, 10, 10, requires_grad=True)
    out = RoIAlign(4, 1.0, 2)(image, [torch.tensor([[1.0, 2, 8, 9]])])
    (grad,) = torch.autograd.grad(out.square().sum(), image, create_graph=True)
    grad.sum().backward()
    assert image.grad is not None
    assert bool(image.grad.any())


@pytest.mark.parametrize("report", [differentiate_a_convolution_twice, differentiate_a_pooling_twice])
def test_what_is_reported_as_unsupported_works(report: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError, match=r"double backwards on \w+ not supported"):
        report()
    with patch_torchvision():
        report()


@pytest.mark.parametrize("name", ["roi_pool", "ps_roi_align", "ps_roi_pool"])
def test_the_second_result_is_torchvisions(name: str) -> None:
    size = (2, 2) if name == "roi_pool" else (1, 2)
    arguments = (IMAGE, ROIS, 0.9, *size, *([2] if name == "ps_roi_align" else []))
    expected = getattr(torch.ops.torchvision, name)(*arguments)[1]
    with patch_torchvision():
        assert_equal(getattr(torch.ops.torchvision, name)(*arguments)[1], expected)


def test_a_batch_of_vmap_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []

    def counted(input: Tensor, *arguments: Any) -> Tensor:
        calls.append(input)
        return kernels.roi_align(input, *arguments)

    monkeypatch.setattr(torchvision_patch, "roi_align", counted)
    with patch_torchvision():
        torch.func.vmap(CALLS["roi_align"][0])(torch.stack([IMAGE] * 3))
    assert len(calls) == 1


def grad_at_the_edge() -> Tensor:
    """The offsets' gradient when samples lie at exactly -1, where the conventions differ."""
    offset = torch.zeros_like(OFFSET).requires_grad_()
    (grad,) = torch.autograd.grad(deform_conv2d(IMAGE, offset, WEIGHT, padding=1).sum(), offset)
    return grad


def grad_of_the_kernels(boundary: str) -> Tensor:
    offset = torch.zeros_like(OFFSET).requires_grad_()
    out = kernels.deform_conv2d(IMAGE, offset, WEIGHT, padding=1, boundary=boundary)
    return torch.autograd.grad(out.sum(), offset)[0]


def test_of_several_patches_the_latest_that_is_on_decides() -> None:
    open_, closed = grad_of_the_kernels("open"), grad_of_the_kernels("closed")
    assert not torch.equal(open_, closed)
    first = patch_torchvision()
    assert_equal(grad_at_the_edge(), open_)
    with patch_torchvision("closed") as second:
        assert_equal(grad_at_the_edge(), closed)
        third = patch_torchvision("open")
        assert_equal(grad_at_the_edge(), open_)
        first.undo()
        assert_equal(grad_at_the_edge(), open_)
        third.undo()
        assert_equal(grad_at_the_edge(), closed)
        third.undo()
        assert_equal(grad_at_the_edge(), closed)
        assert "closed" in repr(second)
        assert "on" in repr(second)
    assert "undone" in repr(second)
    second.undo()


def test_an_error_within_the_block_ends_the_patch() -> None:
    with pytest.raises(ZeroDivisionError), patch_torchvision():
        raise ZeroDivisionError


def test_a_patch_stays_on_when_nobody_holds_it() -> None:
    patch_torchvision()
    assert is_patched()
    [patch] = torchvision_patch._active
    patch.undo()


def test_scripted_and_traced_modules_are_covered() -> None:
    _, by_kernels, x = CALLS["roi_align of a list"]
    boxes = [ROIS[:1, 1:], ROIS[1:, 1:]]
    module = RoIAlign(2, 1.0, -1)
    scripted = torch.jit.script(module)
    expected = gradients(by_kernels, x, 2)
    with patch_torchvision():
        traced = torch.jit.trace(lambda image: module(image, boxes), x)
        assert_equal(gradients(lambda image: scripted(image, boxes), x, 2), expected)
        assert_equal(gradients(traced, x, 2), expected)


def test_autocast_gives_the_dtype_of_the_input() -> None:
    image, rois = IMAGE.bfloat16(), ROIS.bfloat16()
    expected = kernels.roi_align(image.float(), rois.float(), 3).bfloat16()
    with patch_torchvision(), torch.autocast("cpu", torch.bfloat16):
        assert_equal(roi_align(image, rois, 3), expected)
        # torchvision has no rule for this one on the CPU, and refuses the mixture.
        out = deform_conv2d(IMAGE.bfloat16(), OFFSET.float(), WEIGHT.bfloat16(), padding=1)
        assert out.dtype == torch.bfloat16


def test_other_threads_are_covered() -> None:
    by_torchvision, by_kernels, x = CALLS["deform_conv2d by offset"]
    found: list[list[Tensor]] = []
    with patch_torchvision():
        thread = threading.Thread(target=lambda: found.append(gradients(by_torchvision, x, 2)))
        thread.start()
        thread.join()
    assert_equal(found, [gradients(by_kernels, x, 2)])


def compiled_gradients(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = function(x)
    return out.detach(), torch.autograd.grad(out.sin().sum(), x)[0]


def test_what_is_compiled_follows_the_patches() -> None:
    def function(offset: Tensor) -> Tensor:
        out = deform_conv2d(IMAGE, offset, WEIGHT, padding=1)
        return roi_align(out, ROIS, (3, 2), 0.9, 2, True)

    # Without a code generator: what is compiled are the very operators, so that the results are equal bit for bit.
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.zeros_like(OFFSET)
    plain = compiled_gradients(function, x)
    assert_equal(compiled_gradients(compiled, x), plain)
    with patch_torchvision():
        of_open = compiled_gradients(function, x)
        assert_equal(compiled_gradients(compiled, x), of_open)
        with patch_torchvision("closed"):
            assert_equal(compiled_gradients(compiled, x), compiled_gradients(function, x))
        assert not torch.equal(of_open[1], plain[1])
        assert_equal(compiled_gradients(compiled, x), of_open)
        with torch.inference_mode():
            assert_equal(compiled(x), of_open[0])
    assert_equal(compiled_gradients(compiled, x), plain)


def test_what_is_compiled_is_kept_apart_on_disk() -> None:
    def tag() -> str:
        return torch.compiler.config.cache_key_tag

    before = tag()
    with patch_torchvision():
        of_open = tag()
        with patch_torchvision("closed"):
            assert len({before, of_open, tag()}) == 3
        assert tag() == of_open
    assert tag() == before


def test_a_compiled_function_takes_images_of_any_size() -> None:
    compiled = torch.compile(CALLS["roi_align"][0], fullgraph=True, backend="aot_eager", dynamic=True)
    with patch_torchvision():
        for size in ((2, 4, 7, 6), (3, 5, 9, 11)):
            image = draw(*size)
            assert_equal(
                compiled_gradients(compiled, image), compiled_gradients(CALLS["roi_align"][1], image)
            )


def test_an_exported_program_holds_the_kernels_once_decomposed() -> None:
    class Pool(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return roi_align(image, ROIS, 2)

    with patch_torchvision():
        program = torch.export.export(Pool(), (IMAGE,)).run_decompositions()
        assert "gradparity.roi_align" in str(program.graph)
        assert_equal(program.module()(IMAGE), kernels.roi_align(IMAGE, ROIS, 2))


def raw_convolution(**changes: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "input": IMAGE,
        "weight": WEIGHT,
        "offset": OFFSET,
        "mask": IMAGE.new_zeros(2, 1),
        "bias": IMAGE.new_zeros(6),
        **dict.fromkeys(("stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w"), 1),
        "groups": 2,
        "offset_groups": 1,
        "use_mask": False,
        **changes,
    }
    out: Tensor = torch.ops.torchvision.deform_conv2d(*arguments.values())
    return out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 4}, "groups must be the 4 channels of input over weight's 2, got 4"),
        ({"offset_groups": 2}, r"offset must have 2\*offset_groups\*kh\*kw = 36 channels, got 18"),
        ({"input": IMAGE[0]}, "input must have 4 dimensions"),
        ({"use_mask": True}, "mask must have 4 dimensions"),
        ({"stride_h": 0}, "stride must be at least 1, got"),
    ],
)
def test_the_raw_operator_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with patch_torchvision():
        assert raw_convolution().shape == (2, 6, 7, 6)
        with pytest.raises(ValueError, match=message):
            raw_convolution(**changes)


def test_a_wrong_boundary_is_refused() -> None:
    with pytest.raises(ValueError, match='boundary must be "open" or "closed", got'):
        patch_torchvision("half-open")


def test_without_torchvision_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="patch_torchvision needs torchvision, which can't be imported: "):
        patch_torchvision()


def test_without_compiled_operators_it_says_so() -> None:
    # In a process of its own, where torchvision finds no library to load.
    script = (
        "import torch; from kernels import patch_torchvision\n"
        "def refuse(path): raise OSError(path)\n"
        "torch.ops.load_library = refuse\n"
        "try: patch_torchvision()\n"
        "except (ImportError, RuntimeError) as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.startswith("patch_torchvision needs "), done.stderr
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_there", "needs the compiled operator not_there, which torchvision .* lacks here"),
        (
            "nms",
            r"replaces torchvision::nms\(Tensor other\) -> Tensor, but torchvision .* has torchvision::nms\(",
        ),
    ],
)
def test_other_operators_than_the_known_are_refused(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torchvision_patch._KERNELS, name, ("(Tensor other) -> Tensor", None))
    with pytest.raises(RuntimeError, match=message):
        patch_torchvision()
    assert not torchvision_patch._active

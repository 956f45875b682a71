"""What the questions about torch's machinery are made of: whom they ask, and what they leave behind."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.case import Case
from cases.operator import Arithmetic, all_operators, parse_case
from cases.sweep import costly_cases, sweep, typical_cases
from conformance import test_compile, test_memory, test_opcheck
from conformance.bench import Bench, FaultFoundError, expectation_of
from conformance.expectation import Expectation, Gradients
from conformance.isolation import preserved_state
from conformance.ledger import Ledger
from conformance.providers import registry
from conformance.providers.registry import Loaded
from conformance.providers.torchvision import Torchvision
from conformance.subject import Subject
from reports.record import Record, Status

OPERATORS = all_operators()
FUNCTIONS = [operator for operator in OPERATORS.values() if not operator.is_module]
SMALL = "deform_conv2d/dtype=float64,batch=1,in_channels=2,out_channels=2,size=3x4,kernel=1x2"
QUESTIONS = sorted(path.stem for path in Path(test_compile.__file__).parent.glob("test_*.py"))
OF_MODULES = {"test_modules", "test_persistence"}

smoke = functools.cache(lambda: sweep("smoke"))


def question(name: str) -> ModuleType:
    return importlib.import_module(f"conformance.{name}")


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_is_asked_of_every_operator(name: str) -> None:
    cases = [*smoke(), *(case for operator in OPERATORS for case in costly_cases(operator))]
    asked = {case.operator for case in cases if question(name).asks(case)}
    assert asked >= {o.name for o in OPERATORS.values() if o.is_module == (name in OF_MODULES)}


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "test_compile_inductor"])
def test_smoke_asks_every_question_of_each_family(name: str) -> None:
    asked = {case.operator for case in smoke() if question(name).asks(case)}
    families = {o.name for o in OPERATORS.values() if o.leads_family}
    assert asked >= {family for family in families if OPERATORS[family].is_module == (name in OF_MODULES)}


def test_what_takes_long_is_not_in_smoke() -> None:
    costly = {case for operator in FUNCTIONS for case in costly_cases(operator.name)}
    assert costly
    assert not costly & set(smoke())


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "grad": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
    ),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
    "autocast dtype": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "warnings": (lambda: warnings.simplefilter("ignore"), lambda: list(warnings.filters)),
    "random numbers": (lambda: torch.rand(3), lambda: torch.get_rng_state().tolist()),
}


@pytest.mark.parametrize(("change", "read"), SETTINGS.values(), ids=SETTINGS)
def test_a_question_leaves_no_setting_behind(
    change: Callable[[], object], read: Callable[[], object]
) -> None:
    before = read()

    @preserved_state()
    def change_and_fail() -> None:
        change()
        assert read() != before
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_and_fail()
    assert read() == before


def compare(compute: Callable[[Subject], Gradients]) -> tuple[list[Record], list[str]]:
    records: list[Record] = []
    provider = next(p for p in registry.built_in() if p.name == "reference")
    bench = Bench([registry.load(provider)], Ledger([]), records.append)
    expect = Expectation.output_and_gradients
    return records, bench.compare("some", parse_case(SMALL), compute, expect, together="all")


def changed(**changes: Callable[[Tensor], Tensor | None]) -> Callable[[Subject], Gradients]:
    def compute(subject: Subject) -> Gradients:
        found = subject.forward_and_backward()
        for name, change in changes.items():
            quantity = name if name == "output" else f"grad:{name}"
            value = found[quantity]
            assert value is not None
            found[quantity] = change(value)
        return found

    return compute


def test_quantities_together_make_one_record() -> None:
    records, unknown = compare(Subject.forward_and_backward)
    (record,) = records
    assert unknown == []
    assert (record.question, record.quantity, record.status) == ("some", "all", Status.MATCH)
    expectation = expectation_of(parse_case(SMALL))
    sizes = [each.value.numel() for each in expectation.output_and_gradients("open").values()]
    assert record.elements == sum(sizes)
    assert 0 < record.tested <= record.elements
    assert 0 <= record.err_over_bound < 1


def test_one_wrong_quantity_among_right_ones_is_told_by_name() -> None:
    (record,), unknown = compare(changed(weight=lambda grad: grad * 2))
    assert record.status is Status.DEFECT
    assert record.message.startswith("grad:weight: an element is off by")
    assert record.err_over_bound > 1
    assert len(unknown) == 1
    (record,), _ = compare(changed(bias=lambda grad: None))
    assert record.message == "grad:bias: there is none"


def test_a_refusal_is_one_record_too() -> None:
    def refuse(subject: Subject) -> Gradients:
        raise ValueError("not today")

    (record,), _ = compare(refuse)
    assert (record.quantity, record.status) == ("all", Status.DEFECT)  # of one that promises everything
    assert record.message.endswith("ValueError: not today")


@pytest.mark.parametrize("case", [c for o in FUNCTIONS for c in typical_cases(o.name)], ids=str)
def test_an_image_alone_is_its_part_of_the_batch(case: Case) -> None:
    operator = OPERATORS[case.operator]
    tensors = {name: tensor.double() for name, tensor in expectation_of(case).inputs.items()}
    convention = operator.conventions[0]
    whole = operator.oracle(case, tensors, Arithmetic.SIGNED, convention)
    rows_of_all: list[int] = []
    for image in range(2):
        own, rows = operator.image_alone(case, tensors, image)
        changes: dict[str, Any] = {"rois": len(rows)} if hasattr(case, "rois") else {}
        alone = replace(case, batch=1, **changes)  # type: ignore[call-arg]
        torch.testing.assert_close(
            operator.oracle(alone, own, Arithmetic.SIGNED, convention), whole[rows], rtol=1e-12, atol=1e-12
        )
        rows_of_all += rows
    assert sorted(rows_of_all) == list(range(len(whole)))


@pytest.mark.parametrize("case", [c for o in FUNCTIONS for c in typical_cases(o.name)], ids=str)
def test_the_larger_case_changes_lengths_that_torch_compile_leaves_open(case: Case) -> None:
    operator = OPERATORS[case.operator]
    larger = operator.larger(case)
    assert operator.why_invalid(larger) == ""
    here, there = (expectation_of(each).inputs for each in (case, larger))
    changed = [
        (a, b) for name in here for a, b in zip(here[name].shape, there[name].shape, strict=True) if a != b
    ]
    assert len(changed) >= 3
    assert min(min(pair) for pair in changed) > 1


def test_every_operator_can_be_cut() -> None:
    cuts = {o.name: {what for c in typical_cases(o.name) for what in o.cuts(c)} for o in FUNCTIONS}
    assert cuts.pop("deform_conv2d") == {"inputs", "weights"}
    assert all(each == {"channels", "rois"} for each in cuts.values())


def test_a_kept_tensor_is_seen_to_the_byte() -> None:
    if test_memory._mallinfo2() is None:
        pytest.skip("there is no mallinfo2 here")
    before = test_memory.heap_in_use()
    kept = [torch.empty(100, dtype=torch.float64) for _ in range(50)]
    grown = test_memory.heap_in_use() - before
    assert 50 * 800 <= grown < 50 * 1600
    del kept
    assert test_memory.heap_in_use() - before < grown / 2


def test_compiled_code_that_differs_by_one_bit_is_refused() -> None:
    value = torch.tensor([1.0, 2.0])
    test_compile.refuse_difference(
        {"output": value, "grad:x": None}, {"output": value.clone(), "grad:x": None}
    )
    for other in (torch.nextafter(value, value + 1), value.double(), None):
        with pytest.raises(FaultFoundError, match="output differs from eager execution"):
            test_compile.refuse_difference({"output": other}, {"output": value})


def test_the_operators_behind_a_call_are_found_with_what_they_were_given() -> None:
    provider = next(p for p in registry.built_in() if p.name == "reference")
    registry.load(provider)
    subject = Subject(provider, expectation_of(parse_case(SMALL)))
    with test_opcheck._Recorder() as recorder:
        subject.forward_and_backward()
    names = {str(operator) for operator in recorder.calls}
    assert names == {"gradparity.deform_conv2d.default", "gradparity.deform_conv2d_backward.default"}
    (input, *_), _ = recorder.calls[torch.ops.gradparity.deform_conv2d.default]
    assert torch.equal(input, subject.expectation.inputs["input"])
    assert input.requires_grad


def test_a_provider_without_operators_is_not_checked() -> None:
    records: list[Record] = []
    composite = next(p for p in registry.built_in() if p.name == "composite")
    bench = Bench([Loaded(composite, version="1")], Ledger([]), records.append)
    assert bench.check("opcheck", parse_case(SMALL), test_opcheck.find_fault) == []
    assert records[0].status is Status.UNSUPPORTED
    assert records[0].message == "it calls no operator that torch.library knows of"


@pytest.mark.parametrize("modulated", [False, True])
def test_torchvision_s_packs_can_be_pickled(modulated: bool) -> None:
    import pickle

    registry.load(Torchvision())
    layer: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    layer |= {
        "kernel_size": (3, 3),
        "offset_groups": 1,
        "dtype": torch.float64,
        "device": torch.device("cpu"),
    }
    make = Torchvision().modulated_deform_conv2d_pack if modulated else Torchvision().deform_conv2d_pack
    pack = make(2, 2, **layer, **({"bias": True} if modulated else {}))
    again: nn.Module = pickle.loads(pickle.dumps(pack))
    assert type(again) is type(pack)
    image = torch.rand(1, 2, 4, 4, dtype=torch.float64)
    assert torch.equal(again(image), pack(image))

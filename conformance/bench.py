"""Puts a question to every provider and books what each one answers as records."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor

from cases.case import Case
from conformance.expectation import Expectation, Expectations, Gradients
from conformance.isolation import (
    DEFAULT_LIMITS,
    CrashedError,
    Limits,
    OutOfMemoryError,
    RefusedError,
    TimedOutError,
    preserved_state,
    run_isolated,
)
from conformance.ledger import Ledger
from conformance.providers.registry import Loaded
from conformance.providers.remote import Remote
from conformance.subject import MissingOperatorError, Subject
from conformance.verdict import Verdict, judge
from reports.record import Element, Record, Status

# An exception that speaks of the implementation's insides is no clear refusal.
_UNCLEAR = re.compile(
    r"INTERNAL ASSERT|std::|bad_alloc|^(Memory|Index|Key|Attribute|Type|ZeroDivision|System)Error|^\w+:?\s*$"
)

# Statuses that fail a run, unless the ledger has an entry of one of these kinds: reading out of bounds may kill the
# process or give a wrong result.
_KINDS = {
    Status.CONVENTION: ("convention",),
    Status.DEFECT: ("defect", "crash"),
    Status.CRASHED: ("crash",),
    Status.TIMED_OUT: ("crash",),
    Status.OUT_OF_MEMORY: ("defect", "crash"),
}

# How the message of what a provider is not asked begins.
NOT_PROMISED = "not promised: "

_FOLDERS = re.compile(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-]+)")


class FaultFoundError(Exception):
    """A check found something wrong; the message says what."""


@dataclass(frozen=True)
class _Answer:
    """What a provider computed, or the status and message of why it did not."""

    tensors: Gradients
    seconds: float
    status: Status | None = None
    message: str = ""


class Bench:
    """The providers, the ledger, and where records go."""

    def __init__(
        self,
        providers: Sequence[Loaded],
        ledger: Ledger,
        append: Callable[[Record], None],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.providers = [loaded for loaded in providers if not loaded.unavailable]
        self._implementations = {loaded.name: loaded.implementation for loaded in providers}
        self.ledger = ledger
        self.limits = limits
        self._append = append

    def compare(
        self,
        question: str,
        case: Case,
        compute: Callable[[Subject], Gradients],
        expect: Callable[[Expectation, str], Expectations],
        *,
        together: str = "",
    ) -> list[str]:
        """Compares a computation of every provider with the oracle; returns what the ledger does not know.

        The quantities are those of ``expect`` under the operator's first convention. Each is judged under that
        convention, then under the others. With ``together`` they make one record, of the quantity of that name.
        """
        expectation = expectation_of(case)
        quantities = expect(expectation, expectation.operator.conventions[0])
        records: list[Record] = []
        for loaded in self.providers:
            answer = _ask(loaded, expectation, compute, together or question, self.limits)
            judged = []
            for quantity in quantities:
                record = self._blank(question, quantity, loaded, case, answer)
                if answer.status is None:
                    verdicts = _judge_by_conventions(
                        answer.tensors.get(quantity), quantity, expectation, expect
                    )
                    record = _judged(record, verdicts, expectation)
                judged.append(record)
            records += [_merged(judged, together)] if together else judged
        return self._book(case, records)

    def check(
        self, question: str, case: Case, find_fault: Callable[[Subject], str], *, quantity: str = ""
    ) -> list[str]:
        """Asks every provider something that is answered by a fault or an empty string.

        The record's quantity is the question unless another one is given.
        """

        def compute(subject: Subject) -> Gradients:
            if fault := find_fault(subject):
                # An exception, because nothing else leaves the process that a hostile case runs in.
                raise FaultFoundError(fault)
            return {}

        expectation = expectation_of(case)
        records = []
        for loaded in self.providers:
            answer = _ask(loaded, expectation, compute, quantity or question, self.limits)
            records.append(self._blank(question, quantity or question, loaded, case, answer))
        return self._book(case, records)

    def _blank(self, question: str, quantity: str, loaded: Loaded, case: Case, answer: _Answer) -> Record:
        return Record(
            case=case.id,
            operator=case.operator,
            provider=loaded.name,
            version=loaded.version,
            device=case.device,
            dtype=case.dtype,
            boundary=case.boundary,
            question=question,
            quantity=quantity,
            status=answer.status or Status.MATCH,
            message=answer.message,
            seconds=answer.seconds,
        )

    def _book(self, case: Case, records: Iterable[Record]) -> list[str]:
        unknown = []
        for record in records:
            booked = self._look_up(case, record)
            self._append(booked)
            if booked.status in _KINDS and not booked.ledger:
                what = f"{booked.provider} {booked.version}: {booked.quantity} {booked.status}"
                unknown.append(" ".join(filter(None, (what, booked.convention, booked.message))))
        return unknown

    def _look_up(self, case: Case, record: Record) -> Record:
        if record.status not in _KINDS:
            return record
        entry = self.ledger.find(
            self._implementations[record.provider],
            record.version,
            case,
            record.quantity,
            _KINDS[record.status],
        )
        if entry is None:
            return record
        known = Status.KNOWN if record.status is Status.DEFECT else record.status
        return replace(record, ledger=entry.id, status=known)


# Of several quantities, the first of these that one of them has is the status of all.
_WORST_FIRST = (Status.DEFECT, Status.CONVENTION, Status.MATCH, Status.VACUOUS)


def _merged(records: Sequence[Record], quantity: str) -> Record:
    """One record of several quantities that were computed together: its details are the worst one's."""
    if records[0].status not in _WORST_FIRST:
        return replace(records[0], quantity=quantity)
    worst = min(
        records,
        key=lambda record: (_WORST_FIRST.index(record.status), -record.err_over_bound, record.quantity),
    )
    return replace(
        worst,
        quantity=quantity,
        elements=sum(record.elements for record in records),
        tested=sum(record.tested for record in records),
        message=f"{worst.quantity}: {worst.message}" if worst.message else "",
    )


@functools.lru_cache(maxsize=16)
def expectation_of(case: Case) -> Expectation:
    """The case's expectation; the questions of one case share it."""
    return Expectation(case)


def _ask(
    loaded: Loaded,
    expectation: Expectation,
    compute: Callable[[Subject], Gradients],
    what: str,
    limits: Limits,
) -> _Answer:
    started = time.perf_counter()
    asked = f"{expectation.case.operator}/{what}"
    for pattern, reason in getattr(loaded.provider, "not_promised", {}).items():
        if fnmatchcase(asked, pattern):
            return _Answer({}, 0.0, Status.UNSUPPORTED, f"{NOT_PROMISED}{reason}")
    try:
        subject = Subject(loaded.provider, expectation)
        # The parent's oracle must not run in the child: what a cached property computes there is lost.
        _ = expectation.grad_output
        isolate = expectation.case.hostile or loaded.isolated
        if isinstance(loaded.provider, Remote):
            loaded.provider.is_hostile, isolate = isolate, False
        with preserved_state():
            tensors = run_isolated(lambda: compute(subject), limits) if isolate else compute(subject)
        if changed := expectation.restore():
            raise FaultFoundError(f"it changes {', '.join(changed)} in place")
        return _Answer(tensors, time.perf_counter() - started)
    except MissingOperatorError as error:
        status, message = Status.UNSUPPORTED, str(error)
    except CrashedError as error:
        status, message = Status.CRASHED, str(error)
    except TimedOutError as error:
        status, message = Status.TIMED_OUT, str(error)
    except OutOfMemoryError as error:
        status, message = Status.OUT_OF_MEMORY, str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a SystemExit or a pytest.skip of a provider is an answer like any other
        expectation.restore()
        message = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
        found = message.startswith(FaultFoundError.__name__)
        promised = getattr(loaded.provider, "promises_everything", False)
        status = Status.DEFECT if found or promised or _UNCLEAR.search(message) else Status.UNSUPPORTED
        message = message.removeprefix(f"{FaultFoundError.__name__}: ")
    return _Answer({}, time.perf_counter() - started, status, _one_line(message))


def _one_line(message: str) -> str:
    """The beginning of a message in printable characters, without the folders of this machine."""
    printable = "".join(letter if letter.isprintable() else " " for letter in message)
    return _FOLDERS.sub("", " ".join(printable.split()))[:300]


def _judge_by_conventions(
    got: Tensor | None,
    quantity: str,
    expectation: Expectation,
    expect: Callable[[Expectation, str], Expectations],
) -> dict[str, Verdict]:
    """The verdicts under the operator's conventions, up to the first that is right."""
    verdicts: dict[str, Verdict] = {}
    for convention in expectation.operator.conventions:
        verdicts[convention] = judge(got, expect(expectation, convention)[quantity], expectation.dtype)
        if not verdicts[convention].fault:
            break
    return verdicts


def _judged(record: Record, verdicts: dict[str, Verdict], expectation: Expectation) -> Record:
    standard, *_ = verdicts
    right = next((convention for convention, verdict in verdicts.items() if not verdict.fault), None)
    verdict = verdicts[right or standard]
    if right is None:
        status = Status.DEFECT
    elif right != standard:
        status = Status.CONVENTION
    else:
        status = Status.MATCH if verdict.tested else Status.VACUOUS
    # A convention's worst elements are those that differ from the standard.
    shown = verdicts[standard]
    operator, case = expectation.operator, expectation.case
    return replace(
        record,
        status=status,
        convention=right or "" if status is Status.CONVENTION else "",
        err_over_bound=verdict.err_over_bound,
        rms_over_bound=verdict.rms_over_bound,
        max_abs_error=shown.max_abs_error,
        max_ulp_error=shown.max_ulp_error,
        elements=verdict.elements,
        tested=verdict.tested,
        worst=tuple(
            Element(
                element.index,
                element.expected,
                element.got,
                element.err_over_bound,
                tuple(
                    (sample.y, sample.x, sample.boundary)
                    for sample in operator.locate(case, expectation.inputs, record.quantity, element.index)
                ),
            )
            for element in shown.worst
        ),
        message=verdict.fault,
    )

"""The pytest plugin behind `pytest conformance/`: one Run, from the options to the written report."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cases.case import Case
from cases.operator import parse_case
from cases.sweep import devices, sweep
from conformance import ledger as ledgers
from conformance.bench import Bench
from conformance.isolation import GIBIBYTE, Limits
from conformance.providers import registry
from reports.record import Record, Status
from reports.store import RunFolder

if TYPE_CHECKING:
    import pandas as pd

# A number or an answer came out.
ANSWERED = [
    str(status)
    for status in (
        Status.MATCH,
        Status.VACUOUS,
        Status.CONVENTION,
        Status.KNOWN,
        Status.DEFECT,
        Status.CRASHED,
        Status.OUT_OF_MEMORY,
    )
]

RUN = pytest.StashKey["Run"]()
FOLDER = Path(__file__).parent


class Run:
    """A run of the suite in this process: its providers, cases, ledger and folder.

    Under pytest-xdist the controller chooses the folder and the cases, and each worker appends records of its own.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = _now()
        self.worker_input: dict[str, Any] | None = getattr(config, "workerinput", None)
        self.ledger = ledgers.read([ledgers.LEDGER, *map(Path, config.getoption("--ledger"))])
        self.limits = _limits(config)
        isolated = self._names("--isolate")
        self.providers = [
            registry.load(provider, isolated=provider.name in isolated)
            for provider in self._wanted_providers()
        ]
        self.versions = {loaded.name: loaded.version for loaded in self.providers if not loaded.unavailable}
        self._require()
        self._only_collects = bool(config.getoption("collectonly"))
        if self.worker_input is None:
            self.cases = self._choose_cases()
            self.folder = self._new_folder()
        else:
            self.cases = [parse_case(case_id) for case_id in self.worker_input["gradparity_cases"]]
            self.folder = RunFolder(
                self.worker_input["gradparity_folder"], worker=self.worker_input["workerid"]
            )
        self.bench = Bench(self.providers, self.ledger, self.folder.append, self.limits)
        self._summary: list[str] = []

    def _new_folder(self) -> RunFolder:
        if self._only_collects:
            return RunFolder(tempfile.mkdtemp(prefix="gradparity-"))
        folder = RunFolder.create(
            Path(self.config.getoption("--runs") or self.config.rootpath / "reports" / "runs")
        )
        folder.describe(self._description())
        return folder

    def _wanted_providers(self) -> list[Any]:
        without = self._names("--without")
        named = self.config.getoption("--provider")
        providers = [*registry.built_in(), *(registry.from_spec(spec, self.limits) for spec in named)]
        names = [provider.name for provider in providers]
        for option in ("--without", "--isolate"):
            if unknown := set(self._names(option)) - set(names):
                raise ValueError(
                    f"{option}: no provider {sorted(unknown)[0]!r}, there are {', '.join(names)}"
                )
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"--provider: the name {sorted(repeated)[0]!r} is taken")
        return [provider for provider in providers if provider.name not in without]

    def _require(self) -> None:
        reasons = {loaded.name: loaded.unavailable for loaded in self.providers}
        for name in self._names("--require"):
            if reason := reasons.get(name, "there is no such provider in this run"):
                raise ValueError(f"--require: {name} is not available: {reason}")

    def _names(self, option: str) -> list[str]:
        texts = ",".join(self.config.getoption(option)).split(",")
        return [name.strip() for name in texts if name.strip()]

    def _choose_cases(self) -> list[Case]:
        if chosen := self.config.getoption("--case"):
            cases = dict.fromkeys(map(parse_case, chosen))
            if absent := {case.device for case in cases} - set(devices()):
                raise ValueError(f"--case: there is no device {absent.pop()!r} here")
            return list(cases)
        swept = sweep(self.config.getoption("--tier"))
        return list(dict.fromkeys([*swept, *self.ledger.cases(self.versions)]))

    def _description(self) -> dict[str, Any]:
        return {
            "tier": "chosen cases" if self.config.getoption("--case") else self.config.getoption("--tier"),
            "command": shlex.join(["pytest", *self.config.invocation_params.args]),
            "started": self.started,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, **self.versions},
            "machine": {
                "system": platform.platform(),
                "processor": platform.machine(),
                "cores": str(os.cpu_count()),
                "devices": ", ".join(sorted({case.device for case in self.cases})),
            },
            "providers": [
                {
                    "name": loaded.name,
                    "version": loaded.version,
                    "available": not loaded.unavailable,
                    "reason": loaded.unavailable,
                }
                for loaded in self.providers
            ],
            "ledger": {
                entry.id: {"reason": entry.reason, "link": entry.link} for entry in self.ledger.entries
            },
        }

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells an xdist worker which cases there are and where its records go."""
        node.workerinput["gradparity_cases"] = [case.id for case in self.cases]
        node.workerinput["gradparity_folder"] = str(self.folder.path)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """All questions about a case come in a row, so that they share its oracle.

        What pytest puts in the place of a question that no case is asked goes.
        """
        items[:] = [item for item in items if _case_of(item) is not None or not hasattr(item, "callspec")]
        position = {case: number for number, case in enumerate(self.cases)}

        def place(item: pytest.Item) -> int:
            case = _case_of(item)
            return -1 if case is None else position.get(case, -1)

        items.sort(key=place)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Merges the records, writes the report, and fails the run for a ledger entry that no longer holds."""
        self.folder.close()
        if self.worker_input is None and not self._only_collects:
            self._summary = list(self._finish(session.exitstatus == pytest.ExitCode.INTERRUPTED))
            if self._failures and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Books the case that killed an xdist worker, as whose doing is not known."""
        path, _, item = crashitem.partition("::")
        case = parse_case(item[item.index("[") + 1 : -1])
        question = Path(path).stem.removeprefix("test_")
        self.folder.append(
            Record(
                case=case.id,
                operator=case.operator,
                provider="(one of them)",
                version="",
                device=case.device,
                dtype=case.dtype,
                boundary=case.boundary,
                question=question,
                quantity=question,
                status=Status.CRASHED,
                message="the worker died; the same case alone, with one provider at a time, shows of whom",
            )
        )

    def _finish(self, interrupted: bool) -> Iterator[str]:
        # pandas and jinja2 are needed here only.
        from reports import render, store, tables

        description = self._description()
        left_out = []
        if interrupted:
            left_out.append("the run was interrupted: what had not been asked yet is missing")
        else:
            description["finished"] = _now()
        if partial := self._is_partial():
            left_out.append("only some of the questions were asked, so ledger entries may hold or not")
        description["not_compared"] = left_out
        table = self.folder.merge(description)
        asked = set(zip(table["provider"], table["case"], strict=True))
        hit = set(zip(table["ledger"], table["case"], strict=True))
        stale = [] if partial else self.ledger.stale(self.versions, asked, hit)
        stale_entries = [
            f"ledger: {entry.id} no longer holds: {entry.provider} does not diverge on {entry.case}"
            for entry in stale
        ]
        said = {**store.read_description(self.folder.path), "stale_ledger": stale_entries}
        self.folder.describe(said)
        page = render.write_report(self.folder.path)
        yield tables.verdict(table, said).sentence
        self._failures = [*stale_entries, *self._absences(table)]
        yield from self._failures
        yield "Not compared:"
        yield from (
            f"  {sentence}" for sentence in tables.not_compared(table, said) or ["nothing was left out"]
        )
        yield f"Report: {page}"
        yield f"        {page.with_name('report.md')}"

    def _is_partial(self) -> bool:
        """Whether files or items were chosen, so that the question which an entry is about may be missing."""
        options = self.config.option
        whole = any(
            (self.config.invocation_params.dir / argument).resolve() in (FOLDER, *FOLDER.parents)
            for argument in self.config.args
        )
        return not whole or any((options.keyword, options.markexpr, options.deselect, options.ignore))

    def _absences(self, table: pd.DataFrame) -> Iterator[str]:
        """What is missing so badly that a run without it is no pass."""
        for loaded in self.providers:
            if loaded.unavailable and getattr(loaded.provider, "promises_everything", False):
                yield f"{loaded.name} promises everything and is not available: {loaded.unavailable}"
        if not table["status"].isin(ANSWERED).any():
            yield "nothing was compared"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says what came out, what was not compared, and where the report is."""
        if self._summary:
            terminalreporter.section("gradparity")
            for line in self._summary:
                terminalreporter.write_line(line)


def _limits(config: pytest.Config) -> Limits:
    seconds, gibibytes = config.getoption("--time-limit"), config.getoption("--memory-limit")
    for option, value in (("--time-limit", seconds), ("--memory-limit", gibibytes)):
        if not value > 0:
            raise ValueError(f"{option}: got {value:g}, expected a number above 0")
    return Limits(seconds, int(gibibytes * GIBIBYTE))


def is_asked_for(config: pytest.Config) -> bool:
    """Whether this pytest run is about the conformance folder at all."""
    for argument in config.args:
        path = (config.invocation_params.dir / argument.split("::")[0]).resolve()
        if path == FOLDER or FOLDER in path.parents or path in FOLDER.parents:
            return True
    return False


def start(config: pytest.Config) -> None:
    """Starts a run when the conformance folder is asked for; wrong options end pytest with one sentence."""
    if not is_asked_for(config) or config.getoption("help", False):
        return
    if getattr(config.option, "dist", "no") == "load":
        # Neighbouring items share an oracle; only work stealing keeps them in one worker.
        config.option.dist = "worksteal"
    try:
        run = Run(config)
    except (ValueError, OSError) as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[RUN] = run
    config.pluginmanager.register(run, "gradparity-run")
    # The same records with and without xdist; more than one, because a race needs two.
    torch.set_num_threads(2)


def _case_of(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    return case if isinstance(case, Case) else None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")

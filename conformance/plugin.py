"""The pytest plugin behind `pytest conformance/`: one Run, from the options to the written report."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import shlex
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cases.case import Case
from cases.operator import parse_case
from cases.sweep import devices, sweep
from conformance import ledger as ledgers
from conformance.bench import NOT_PROMISED, Bench
from conformance.isolation import GIBIBYTE, Limits
from conformance.parts import Shard, digest, digest_of_sources
from conformance.providers import registry
from reports.record import Record, Status
from reports.store import RunFolder, find_run, read_description

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

    Under pytest-xdist the controller chooses the cases and writes the folder; what a worker records, on this host or
    on another, travels with the report of each item.
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
        self._recorded: list[Record] = []
        self.bench = Bench(self.providers, self.ledger, self._recorded.append, self.limits)
        self._collected: set[str] = set()
        self._done: set[str] = set()
        self._summary: list[str] = []
        self._failures: list[str] = []
        if self.worker_input is None:
            self._shard = Shard.parse(config.getoption("--shard"))
            self._all_cases = self._choose_cases()
            self.cases = [case for case in self._all_cases if self._shard.has(case.id)]
            self._folder = self._resumed_folder() or self._new_folder()
        else:
            self._join(self.worker_input)

    def _join(self, worker_input: dict[str, Any]) -> None:
        """Takes the controller's cases. Raises ValueError when this is not the same suite."""
        for what, theirs in worker_input["gradparity_identity"].items():
            ours = self._own_identity().get(what, theirs)
            if ours != theirs:
                raise ValueError(
                    f"this worker's {what} differ from the controller's: {ours} here, {theirs} there"
                )
        self.cases = [parse_case(case_id) for case_id in worker_input["gradparity_cases"]]
        self._done = set(worker_input["gradparity_done"])

    def _own_identity(self) -> dict[str, str]:
        """What makes two runs parts of one: the sources, and the providers with their versions."""
        providers = "; ".join(f"{loaded.name} {loaded.version or 'unavailable'}" for loaded in self.providers)
        return {"sources": digest_of_sources(), "providers": providers, "torch": str(torch.__version__)}

    @functools.cached_property
    def _identity(self) -> dict[str, str]:
        """What a run that goes on with this one, or another shard of it, must have in common with it."""
        config = self.config
        selection = [*config.args, config.option.keyword, config.option.markexpr]
        selection += [*(config.option.deselect or ()), *(config.option.ignore or ())]
        return {
            **self._own_identity(),
            "cases": digest([case.id for case in self._all_cases]),
            "ledger": digest([repr(entry) for entry in self.ledger.entries]),
            "limits": f"{self.limits}, isolated: {', '.join(sorted(self._names('--isolate')))}",
            "questions": shlex.join(filter(None, map(str, selection))),
        }

    def _new_folder(self) -> RunFolder:
        if self._only_collects:
            return RunFolder(tempfile.mkdtemp(prefix="gradparity-"))
        folder = RunFolder.create(self._runs)
        folder.describe(self._description())
        return folder

    @property
    def _runs(self) -> Path:
        return Path(self.config.getoption("--runs") or self.config.rootpath / "reports" / "runs")

    def _resumed_folder(self) -> RunFolder | None:
        """The folder of the run to go on with. Raises ValueError when this is another one, or it has finished."""
        run = self.config.getoption("--resume")
        if not run:
            return None
        folder = RunFolder(find_run(run, self._runs))
        said = read_description(folder.path)
        if said.get("finished"):
            raise ValueError(f"--resume: {folder.run} has finished, there is nothing to resume")
        now = {**self._identity, "shard": str(self._shard)}
        before = {**said.get("identity", {}), "shard": said.get("shard", "")}
        for what, value in now.items():
            if value != before.get(what):
                raise ValueError(
                    f"--resume: the {what} of {folder.run} differ: {before.get(what)!r} then, {value!r} now"
                )
        self.started = said.get("started", self.started)
        self._done = {item.name for item in folder.items()[0].values() if item.finished}
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
        known = self.ledger.cases({(loaded.implementation, loaded.version) for loaded in self.providers})
        return list(dict.fromkeys([*swept, *known]))

    def _description(self) -> dict[str, Any]:
        return {
            "tier": "chosen cases" if self.config.getoption("--case") else self.config.getoption("--tier"),
            "command": shlex.join(["pytest", *self.config.invocation_params.args]),
            "started": self.started,
            "shard": str(self._shard),
            "identity": self._identity,
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
        """Tells an xdist worker which cases there are, and what it must have in common with its controller."""
        node.workerinput["gradparity_identity"] = self._own_identity()
        node.workerinput["gradparity_cases"] = [case.id for case in self.cases]
        node.workerinput["gradparity_done"] = sorted(self._done)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """All questions about a case come in a row, so that they share its oracle.

        What pytest puts in the place of a question that no case is asked goes.
        """
        items[:] = [item for item in items if _case_of(item) is not None or not hasattr(item, "callspec")]
        self._collected.update(item.nodeid for item in items)
        items[:] = [item for item in items if item.nodeid not in self._done]
        position = {case: number for number, case in enumerate(self.cases)}

        def place(item: pytest.Item) -> int:
            case = _case_of(item)
            return -1 if case is None else position.get(case, -1)

        items.sort(key=place)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Notes what there is to ask; an xdist controller collects nothing itself."""
        self._collected.update([*ids, *self._done])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Ends a run of which an xdist worker can't be part, before xdist starts that worker again."""
        if refusal := getattr(node, "workeroutput", {}).get("gradparity_refusal"):
            pytest.exit(f"{node.gateway.spec}: {refusal}", returncode=pytest.ExitCode.USAGE_ERROR)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Puts what an item recorded into its report, which xdist carries to the controller from any host."""
        report = yield
        if call.when == "call":
            report.gradparity_records = [record.to_json() for record in self._recorded]  # type: ignore[attr-defined]
            # An error of the suite's own leaves no record that would fail a resumed run: it is asked again.
            outcomes = (pytest.fail.Exception, pytest.skip.Exception)
            report.gradparity_answered = call.excinfo is None or isinstance(call.excinfo.value, outcomes)  # type: ignore[attr-defined]
            self._recorded.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes what an item recorded."""
        lines = getattr(report, "gradparity_records", None)
        if lines is not None and self.worker_input is None:
            records = [Record.from_json(line) for line in lines]
            self._append(report.nodeid, records, finished=report.gradparity_answered)

    def _append(self, item: str, records: list[Record], *, finished: bool = True) -> None:
        try:
            self._folder.append(item, records, finished=finished)
        except OSError as error:
            pytest.exit(
                f"the records can't be written to {self._folder.path}: {error.strerror};"
                f" with --resume {self._folder.run} the run goes on",
                returncode=pytest.ExitCode.INTERNAL_ERROR,
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the table and the report, and fails the run for what the records say, and for a stale ledger entry."""
        if self.worker_input is not None or self._only_collects:
            return
        self._folder.close()
        broken = session.exitstatus not in (
            *(pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED),
        )
        try:
            self._summary = list(self._finish(broken or bool(session.shouldstop)))
        except OSError as error:
            self._summary = [f"the report can't be written: {error}"]
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        if self._failures and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and (self._done or not self.cases):
            session.exitstatus = pytest.ExitCode.OK  # all was asked before, or the shard is empty

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """Books the case that killed an xdist worker, as whose doing is not known."""
        path, _, item = crashitem.partition("::")
        case = parse_case(item[item.index("[") + 1 : -1])
        question = Path(path).stem.removeprefix("test_")
        record = Record(
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
            message="the worker died; the same case with --isolate and the providers' names shows of whom",
        )
        self._append(crashitem, [record], finished=False)

    def _finish(self, interrupted: bool) -> Iterator[str]:
        # pandas and jinja2 are needed here only.
        from reports import render, store, tables

        description = self._description()
        left_out = []
        items = self._folder.items()[0]
        missing = self._collected - {name for name, item in items.items() if item.finished or item.records}
        if interrupted or missing:
            left_out.append(
                f"the run was interrupted: {len(missing):,} of {len(self._collected):,} questions were not asked;"
                f" --resume {self._folder.run} goes on"
            )
        else:
            description["finished"] = _now()
        if partial := self._is_partial():
            left_out.append("only some of the questions were asked, so ledger entries may hold or not")
        description["not_compared"] = left_out
        table = self._folder.tabulate(description)
        implementations = {loaded.name: loaded.implementation for loaded in self.providers}
        answered = table[~table["message"].str.startswith(NOT_PROMISED)]
        columns = (
            answered["provider"].map(implementations),
            *(answered[n] for n in ("version", "case", "quantity")),
        )
        asked = set(zip(*columns, strict=True))
        hit = set(zip(table["ledger"], table["version"], table["case"], strict=True))
        stale = [] if partial else self.ledger.stale(asked, hit)
        stale_entries = [
            f"ledger: {entry.id} no longer holds: {entry.provider} {version} does not diverge on {entry.case}"
            for entry, version in stale
        ]
        said = {**store.read_description(self._folder.path), "stale_ledger": stale_entries}
        if not missing:  # then every line that can't be read came again
            said["damaged"] = []
        self._folder.describe(said)
        page = render.write_report(self._folder.path)
        yield tables.verdict(table, said).sentence
        self._failures = [*stale_entries, *self._absences(table)]
        yield from self._failures
        if (
            tables.outcomes(table).isin(tables.ALARMS).any()
        ):  # also of what was asked before a run was resumed
            self._failures.append("there are new divergences")
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
        if self.cases and not table["status"].isin(ANSWERED).any():
            yield "nothing was compared"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says what came out, what was not compared, and where the report is."""
        if self._summary:
            terminalreporter.section("gradparity")
            for line in self._summary:
                terminalreporter.write_line(line)


class _RefusingWorker:
    """An xdist worker that can't take part. Were it to fail at once, its controller would not learn why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def pytest_collection(self, session: pytest.Session) -> None:
        """Tells the controller why, and stops."""
        session.config.workeroutput["gradparity_refusal"] = self._reason  # type: ignore[attr-defined]
        pytest.exit(self._reason, returncode=pytest.ExitCode.INTERRUPTED)


def _refuse_paths_for_other_hosts(config: pytest.Config) -> None:
    """xdist translates a path only for sources that it has copied to the host itself, and fails for all others."""
    elsewhere = [
        spec
        for spec in getattr(config.option, "tx", None) or ()
        if any(part.startswith(("ssh=", "socket=", "chdir=")) for part in spec.split("//"))
    ]
    paths = [arg for arg in config.invocation_params.args if Path(str(arg).partition("::")[0]).exists()]
    if elsewhere and paths and not hasattr(config, "workerinput"):
        raise pytest.UsageError(
            f"--tx: {elsewhere[0]} can't be given the path {paths[0]}, expected -o testpaths=conformance instead"
        )


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
    _refuse_paths_for_other_hosts(config)
    try:
        run = Run(config)
    except (ValueError, OSError) as error:
        if hasattr(config, "workerinput"):
            config.pluginmanager.register(_RefusingWorker(str(error)))
            return
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

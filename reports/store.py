"""The folder of a run: records as they are made, the table they become, and the run's description.

    reports/runs/<run>/records.jsonl     one line per item of the run with its Records, never rewritten, never removed
    reports/runs/<run>/records.parquet   all records, sorted, as a flat table (`tabulate`)
    reports/runs/<run>/run.json          the description (`describe`, `tabulate`)
    reports/runs/latest                  points to the newest run

An item is what is asked at once: a question about a case, of every provider. pandas and pyarrow are imported by the
functions that need them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, cast

from reports.record import Record, Status

if TYPE_CHECKING:
    import pandas as pd

# Relative to the working directory: an installed package must not write beside itself.
DEFAULT_ROOT = Path("reports/runs")
RECORDS = "records.jsonl"
TABLE = "records.parquet"
DESCRIPTION = "run.json"
LATEST = "latest"

_FLOATS = ["err_over_bound", "rms_over_bound", "max_abs_error", "max_ulp_error", "seconds"]
_INTEGERS = ["elements", "tested"]
# The order of the columns: what was asked, what it came to, how far off, why.
COLUMNS = (
    *(
        "run",
        "case",
        "operator",
        "provider",
        "version",
        "device",
        "dtype",
        "boundary",
        "question",
        "quantity",
    ),
    *("status", "convention"),
    *("err_over_bound", "rms_over_bound", "max_abs_error", "max_ulp_error", "elements", "tested"),
    *("worst", "message", "ledger", "seconds"),
)


class ProviderState(TypedDict, total=False):
    """One provider of a run: ``reason`` says in a sentence why it is not ``available``."""

    name: str
    version: str
    available: bool
    reason: str


class LedgerNote(TypedDict, total=False):
    """What the report quotes of a ledger entry; ``link`` is shown as a link when it is http(s)."""

    reason: str
    link: str


class Description(TypedDict, total=False):
    """What a run says about itself in run.json. A plain dict; every key may be missing.

    ``started`` and ``finished`` are ISO 8601 times, ``not_compared`` sentences ("no CUDA device: ..."),
    ``ledger`` maps the ids that records carry to their reasons, ``stale_ledger`` has a sentence for each
    entry that no longer holds. ``run`` and ``damaged`` (lines of the jsonl files that could not be read, as
    "records.jsonl:17") are filled in by `RunFolder`.

    ``shard`` is "K/N" of a run that was given the K-th of N parts of its cases. ``identity`` holds what must be the
    same in a run that goes on with this one, or in the other shards of it: a digest, or text, of each.
    """

    run: str
    tier: str
    command: str
    started: str
    finished: str
    versions: dict[str, str]
    machine: dict[str, str]
    providers: list[ProviderState]
    not_compared: list[str]
    ledger: dict[str, LedgerNote]
    stale_ledger: list[str]
    damaged: list[str]
    shard: str
    identity: dict[str, str]


@dataclass(frozen=True)
class Item:
    """What came of one item: ``finished`` is false when the process that was asked died."""

    name: str
    records: tuple[Record, ...]
    finished: bool

    @classmethod
    def from_json(cls, line: str) -> Item:
        """The item of a line that `RunFolder.append` wrote. Raises ValueError on anything else."""
        row = json.loads(line)
        try:
            records = tuple(Record.from_json(json.dumps(record)) for record in row["records"])
            return cls(row["item"], records, row["finished"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an item: {error}: {line[:200]}") from error


class RunFolder:
    """The folder of one run; one process at a time appends to it.

    Raises FileNotFoundError when ``path`` is not a folder (`create` makes one).
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"path must be the folder of a run, got {str(path)!r}, which is no folder"
            )
        self._stream: int | None = None

    @classmethod
    def create(cls, root: Path | str = DEFAULT_ROOT) -> RunFolder:
        """A new run folder in ``root``, named by the time (UTC) and four random hex digits, made `latest`."""
        root = Path(root)
        while True:
            stamp = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S")
            path = root / f"{stamp}-{secrets.token_hex(2)}"
            with contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                break
        (path / RECORDS).touch()
        point_latest(path)
        return cls(path)

    @property
    def run(self) -> str:
        """The run's id, which is the folder's name."""
        return self.path.name

    def append(self, item: str, records: Iterable[Record], *, finished: bool = True) -> None:
        """Writes the records of an item and hands them to the operating system at once: a crash loses no item.

        An item of this name that is there already is superseded; one that is not ``finished`` will be asked again.

        Raises TypeError for anything but Records, and for values that JSON has no form for (numpy scalars, tensors),
        OSError when the disk is full.
        """
        rows = []
        for record in records:
            if not isinstance(record, Record):
                raise TypeError(f"records must be Records, got {type(record).__name__}")
            rows.append(json.loads(record.to_json()))
        line = json.dumps({"item": item, "finished": finished, "records": rows}, separators=(",", ":"))
        self._write(line.encode("ascii") + b"\n")

    def _write(self, line: bytes) -> None:
        if self._stream is None:
            self._stream = os.open(self.path / RECORDS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            size = os.fstat(self._stream).st_size
            # What a process that died, or a full disk, left in mid-line must not swallow the next item.
            if size and os.pread(self._stream, 1, size - 1) != b"\n":
                line = b"\n" + line
        try:
            while line:
                line = line[os.write(self._stream, line) :]
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; `append` opens it again."""
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def items(self) -> tuple[dict[str, Item], list[str]]:
        """The newest line of each item, and the unreadable lines.

        A line that a dying process left unfinished is not an error: it is named ("records.jsonl:17") in the second
        list.
        """
        found: dict[str, Item] = {}
        damaged: list[str] = []
        lines = (self.path / RECORDS).read_text(encoding="ascii", errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            if line:
                try:
                    item = Item.from_json(line)
                    found[item.name] = item
                except ValueError:
                    damaged.append(f"{RECORDS}:{number}")
        return found, damaged

    def records(self) -> tuple[list[Record], list[str]]:
        """All records, sorted by (case, provider, question, quantity), and the unreadable lines (see `items`).

        Ties are sorted by content, so that the order does not depend on who was first.
        """
        items, damaged = self.items()
        found = [record for item in items.values() for record in item.records]
        found.sort(key=lambda r: (r.case, r.provider, r.question, r.quantity, r.to_json()))
        return found, damaged

    def describe(self, description: Mapping[str, Any]) -> None:
        """Writes run.json. Worth doing when the run starts too: an interrupted run then says what it was.

        Raises TypeError when ``description`` holds something that JSON has no form for.
        """
        text = json.dumps({"run": self.run, **description}, indent=2, ensure_ascii=False)
        _replace(self.path / DESCRIPTION, text.encode("utf-8"))

    def tabulate(self, description: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Reads all items, writes records.parquet and run.json, and returns the table.

        The table has the columns `COLUMNS`: the fields of a Record, ``run`` in front, ``status`` as its
        string and ``worst`` as a JSON string. Without ``description`` the one on disk is kept.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        records, damaged = self.records()
        kinds = {**dict.fromkeys(_FLOATS, pa.float64()), **dict.fromkeys(_INTEGERS, pa.int64())}
        schema = pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
        rows = [
            {**vars(record), "run": self.run, "status": str(record.status), "worst": _worst_json(record)}
            for record in records
        ]
        content = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), content)
        _replace(self.path / TABLE, content.getvalue())
        kept: Mapping[str, Any] = read_description(self.path) if description is None else description
        self.describe({**kept, "damaged": damaged})
        return read_table(self.path)


def _worst_json(record: Record) -> str:
    return json.dumps(json.loads(record.to_json())["worst"], separators=(",", ":"))


def _replace(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old or the new content, never half of it."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_table(folder: Path | str) -> pd.DataFrame:
    """The table that `RunFolder.tabulate` wrote into ``folder``.

    Raises FileNotFoundError when it is not there, ValueError when a column is missing or a status is unknown.
    """
    import pandas as pd

    path = Path(folder) / TABLE
    if not path.is_file():
        raise FileNotFoundError(
            f"folder must hold {TABLE} (RunFolder.tabulate writes it), got {str(folder)!r}"
        )
    table = pd.read_parquet(path)
    if missing := [name for name in COLUMNS if name not in table.columns]:
        raise ValueError(f"{path} must have the columns of a Record, but lacks {', '.join(missing)}")
    if unknown := set(table["status"]) - {str(status) for status in Status}:
        raise ValueError(f"{path} must hold known statuses only, got {', '.join(map(repr, sorted(unknown)))}")
    return table


def read_description(folder: Path | str) -> Description:
    """The description of a run, empty when none was written. Raises ValueError when run.json is no object."""
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return cast(Description, found)


def point_latest(run: Path) -> None:
    """Makes `latest` beside ``run`` point to it, in one step: a link, or its name in a file without links."""
    temporary = run.parent / f".{LATEST}-{secrets.token_hex(4)}"
    try:
        temporary.symlink_to(run.name, target_is_directory=True)
    except (OSError, NotImplementedError):
        temporary.write_text(run.name + "\n", encoding="utf-8")
    os.replace(temporary, run.parent / LATEST)


def find_run(run: str = LATEST, root: Path | str = DEFAULT_ROOT) -> Path:
    """The folder of a run given by its id, by "latest" or by its path.

    Raises FileNotFoundError when there is no such run.
    """
    named = Path(root) / run
    if named.is_file():  # `latest` where links are impossible
        named = Path(root) / named.read_text(encoding="utf-8").strip()
    for path in (named, Path(run)):
        if (path / RECORDS).exists() or (path / TABLE).is_file():
            return path.resolve()
    raise FileNotFoundError(f"run must be an id in {root}, 'latest' or a run's folder, got {run!r}")

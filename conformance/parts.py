"""What makes runs parts of one: shards of its cases, and digests that must be the same."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# What decides an answer; a changed report does not make it another one.
_DECIDES = ("cases", "conformance", "kernels")
_SUFFIXES = {".py", ".toml", ".cpp", ".h"}


@dataclass(frozen=True)
class Shard:
    """The ``number``-th of ``count`` parts of all cases, from 1, by their ids: independent of their order."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard of ``K/N``; of an empty text, everything. Raises ValueError for anything else."""
        if not text:
            return cls()
        match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text, re.ASCII)
        if not match or int(match[1]) > int(match[2]):
            raise ValueError(f"--shard: got {text!r}, expected K/N with K from 1 to N")
        return cls(int(match[1]), int(match[2]))

    def has(self, case_id: str) -> bool:
        """Whether the case of this id is in it."""
        return int(hashlib.sha256(case_id.encode()).hexdigest(), 16) % self.count == self.number - 1

    def __str__(self) -> str:
        return "" if self.count == 1 else f"{self.number}/{self.count}"


def digest(texts: Iterable[str]) -> str:
    """A short digest of the texts in any order."""
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]


@functools.cache
def digest_of_sources() -> str:
    """A digest of the files of this working copy that decide what comes out."""
    root = Path(__file__).parents[1]
    files = (file for folder in _DECIDES for file in (root / folder).rglob("*") if file.suffix in _SUFFIXES)
    return digest(
        f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files
    )

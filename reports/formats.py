"""How a report writes numbers, positions and commands, and how it escapes text for Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

DASH = "\u2013"  # NaN, nothing to show


def ratio(value: float) -> str:
    """err/bound and errors: 3 significant digits, NaN as a dash (0.314, 12.0, 1.83e3, inf)."""
    if math.isnan(value):
        return DASH
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    mantissa, _, exponent = f"{value:#.3g}".partition("e")
    return mantissa.rstrip(".") + (f"e{int(exponent)}" if exponent else "")


def pair(expected: float, got: float) -> tuple[str, str]:
    """Two values of a tensor, with as many digits as it takes to tell them apart."""
    short = f"{expected:.9g}", f"{got:.9g}"
    return short if short[0] != short[1] else (f"{expected:.17g}", f"{got:.17g}")


def coordinate(value: float) -> str:
    """A sampling coordinate in pixels. 2 - 1e-13 is not written as 2: the side of an integer matters."""
    short = f"{value:.10g}"
    return repr(value) if float(short).is_integer() and float(short) != value else short


def samples(positions: Iterable[tuple[float, float, str]], limit: int = 4) -> str:
    """Sampling positions as "(y, x) class", each once, the first ``limit`` and how many more."""
    shown = list(dict.fromkeys(f"({coordinate(y)}, {coordinate(x)}) {name}" for y, x, name in positions))
    rest = len(shown) - limit
    return "; ".join(shown[:limit]) + (f"; and {rest} more" if rest > 0 else "") if shown else DASH


def index(numbers: Iterable[int]) -> str:
    """An index as (0, 2, 1)."""
    return f"({', '.join(str(number) for number in numbers)})"


def names(hit: Sequence[str], asked: Sequence[str]) -> str:
    """Boundary classes: a list, or "all 18", or "all 18 but zero, mixed" where that is much shorter."""
    missing = [name for name in asked if name not in hit]
    if len(asked) < 4 or len(missing) * 2 > len(hit):
        return ", ".join(hit)
    return f"all {len(asked)}" + (f" but {', '.join(missing)}" if missing else "")


def quantities(given: Iterable[str]) -> str:
    """Quantities by order of derivative: "output; grad: input, offset; gradgrad: input"."""
    orders: dict[str, list[str]] = {}
    for quantity in given:
        order, _, of = quantity.rpartition(":")
        orders.setdefault(order, []).append(of)
    return "; ".join((f"{order}: " if order else "") + ", ".join(of) for order, of in orders.items())


def cut(text: str, limit: int = 800) -> str:
    """``text``, or its beginning and how long it is."""
    return text if len(text) <= limit else f"{text[:limit]} \u2026 (cut, {len(text):,} characters)"


def command(case: str) -> str:
    """The shell command that reruns a case."""
    return "pytest conformance/ --case '" + case.replace("'", "'\\''") + "'"


def markdown(text: object) -> str:
    """``text`` on one line, with everything escaped that Markdown, a table or HTML in it would act on."""
    line = " ".join(str(text).split())
    line = re.sub(r"([\\`*\[\]<>|~])", r"\\\1", line)
    line = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", line)
    return re.sub(r"&(?=[A-Za-z#])", "&amp;", line)


def markdown_code(text: str) -> str:
    """``text`` as inline code, also within a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"

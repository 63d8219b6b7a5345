"""Parse whole numbers, and amounts such as `60%`, `500M`, `25MB` and `8ms`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError
from onnxgrail.options import Metric

LONGEST = 18  # digits: more do not fit into 64 bits
FIT = 3 * 2**29  # bytes of memory that a fit may take, or `PER_CACHE` per byte of --cache-budget if that is more
PER_CACHE = 1.5


def whole(text: str) -> int | None:
    """Return the number that a text is, None if it is not a number of at most 18 digits without a sign."""
    digits = text.strip()
    return int(digits) if digits.isdecimal() and len(digits) <= LONGEST else None


METRICS: tuple[Metric, ...] = ("params", "macs", "size", "latency")

_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_BYTES = {"": 1.0, "B": 1.0}
_BYTES |= {f"{p}B": 1000.0**n for n, p in enumerate("KMGT", 1)} | {f"{p}IB": 1024.0**n for n, p in enumerate("KMGT", 1)}
_TIMES = {"US": 1e-3, "MS": 1.0, "S": 1e3}
UNITS = {"params": _COUNTS, "macs": _COUNTS, "size": _BYTES, "latency": _TIMES}
EXAMPLES = {"params": "60% or 500M", "macs": "60% or 1.2G", "size": "60% or 25MB", "latency": "60% or 8ms"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A budget: parameters, multiply-accumulates per sample, bytes on disk or milliseconds per run.

    Attributes:
        metric: the quantity that is limited.
        text: as the user wrote it.
        share: fraction of the original that may stay, None for an absolute limit.
        value: absolute limit if `share` is None.
    """

    metric: Metric
    text: str
    share: float | None
    value: float

    @property
    def option(self) -> str:
        """Return the name of the option that sets it."""
        return f"--target-{self.metric}"

    def limit(self, original: float) -> float:
        """Return the absolute limit for a model whose metric is `original`."""
        return self.value if self.share is None else self.share * original


def parse(metric: Metric, text: str) -> Target:
    """Parse a target that the user wrote.

    Raises:
        UsageError: not a positive number with a unit of this metric, or a share above 100 %.
    """
    wanted = f"Write {EXAMPLES[metric]}"
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-zµμ%]*)\s*", str(text), re.IGNORECASE)
    number = _number(match)
    if match is None or not 0 < number < math.inf:
        raise UsageError(f"--target-{metric} {text!r} is not a positive amount", hint=wanted)
    if match[2] == "%":
        if number > 100:
            raise UsageError(f"--target-{metric} {text!r} is more than all of the model", hint=wanted)
        return Target(metric=metric, text=str(text), share=number / 100, value=number)
    unit = UNITS[metric].get(re.sub("[µμ]", "u", match[2]).upper())
    if unit is None:
        known = ", ".join(["%", *(u.lower() if metric == "latency" else u for u in UNITS[metric] if u)])
        raise UsageError(f"--target-{metric} {text!r} has no unit of {known}", hint=wanted)
    if metric != "latency" and number * unit < 1:
        raise UsageError(f"--target-{metric} {text!r} is less than one", hint=f"For a share write {number * 100:g}%")
    return Target(metric=metric, text=str(text), share=None, value=number * unit)


def cache_bytes(recipe: Recipe) -> int:
    """Return the bytes of activations that may stay in memory; `512M` and `2G` count in powers of 1024.

    Raises:
        UsageError: not a size in bytes.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", recipe.cache_budget, re.IGNORECASE)
    unit = match[2].upper() if match is not None else ""
    scale = _BYTES.get(f"{unit}IB" if unit in ("K", "M", "G", "T") else unit)
    number = _number(match)
    if scale is None or not number * scale < math.inf:
        raise UsageError(f"--cache-budget {recipe.cache_budget!r} is not a size in bytes", hint="Write 512M or 2G")
    return int(number * scale)


def fit_bytes(recipe: Recipe) -> int:
    """Return the bytes of memory that a fit may take."""
    return max(FIT, int(PER_CACHE * cache_bytes(recipe)))


def cache_for(fit: int) -> str:
    """Return the cache size with which a fit may take so many bytes, as the option is written."""
    return f"{math.ceil(fit / PER_CACHE / 2**30 * 10) / 10:.1f}G"


def _number(match: re.Match[str] | None) -> float:
    """Return the number of a matched amount; NaN if it is not a number, such as 1.2.3."""
    try:
        return float(match[1]) if match is not None else math.nan
    except ValueError:
        return math.nan


def target_of(recipe: Recipe) -> Target | None:
    """Return the recipe's target, None if a ratio is used.

    Raises:
        UsageError: it has several targets, or one that cannot be parsed.
    """
    given = [(m, text) for m in METRICS if (text := getattr(recipe, f"target_{m}")) is not None]
    if len(given) > 1:
        names = " and ".join(f"--target-{m}" for m, _ in given)
        raise UsageError(f"{names} exclude each other", hint="Give one of them")
    return parse(*given[0]) if given else None

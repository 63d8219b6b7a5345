"""What the processor can do, as far as it matters to who multiplies matrices."""

from __future__ import annotations

import functools
from pathlib import Path

AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}  # what OpenBLAS's kernels for SkylakeX use
NEWER = 26  # AMD family from which OpenBLAS up to 0.3.31 takes a processor for one without AVX-512


@functools.cache
def described() -> str:
    """What Linux says about the processor; '' elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def has_avx512(text: str) -> bool:
    """Whether it is a processor with AVX-512.

    Args:
        text: as of `described`.
    """
    return set(_facts(text).get("flags", "").split()) >= AVX512


def is_newer(text: str) -> bool:
    """Whether it is an AMD processor with AVX-512 that OpenBLAS does not know to have it.

    Args:
        text: as of `described`.
    """
    facts = _facts(text)
    family = facts.get("cpu family", "")
    amd = facts.get("vendor_id") == "AuthenticAMD" and family.isdecimal() and int(family) >= NEWER
    return amd and has_avx512(text)


def _facts(text: str) -> dict[str, str]:
    """Of the first core."""
    lines = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}

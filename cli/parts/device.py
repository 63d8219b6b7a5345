"""The device on which models run."""

from __future__ import annotations

import re

import click

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def resolve_providers(device: str | None, providers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the execution providers, given by --device or by --providers."""
    if device is not None and providers:
        raise click.UsageError("give --device or --providers, not both")
    named = tuple(dict.fromkeys(part for text in providers for part in re.split(r"[,\s]+", text) if part))
    kind, colon, numbers = (device or "cpu").partition(":")
    return named or ((CPU,) if kind == "cpu" else (f"{CUDA}{colon}{numbers}", CPU))

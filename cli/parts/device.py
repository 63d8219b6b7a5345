"""Options for the device on which models run, and for libraries of operators."""

from __future__ import annotations

import re
from collections.abc import Callable

import click

from . import values
from .options import F, chain

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

custom_ops_option = click.option(
    "--custom-ops",
    type=click.Path(),
    multiple=True,
    metavar="LIBRARY",
    help="Shared library with operators that ONNX Runtime does not have; its code is executed.  Repeatable.",
)


def _device(default: str) -> Callable[[F], F]:
    return chain(
        click.option(
            "--device",
            type=values.device,
            metavar="cpu|cuda[:N,...]",
            help="Device on which models run and sums are computed; several GPUs need as many processes (torchrun).  "
            f"[default: {default}]",
        ),
        click.option(
            "--providers", multiple=True, metavar="NAME", help="Execution providers instead of --device; repeatable."
        ),
        custom_ops_option,
    )


device_options, device_instead = _device("cpu"), _device("the recipe's")


def resolve_providers(device: str | None, providers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the execution providers, given by --device or by --providers."""
    if device is not None and providers:
        raise click.UsageError("give --device or --providers, not both")
    named = tuple(dict.fromkeys(part for text in providers for part in re.split(r"[,\s]+", text) if part))
    kind, colon, numbers = (device or "cpu").partition(":")
    return named or ((CPU,) if kind == "cpu" else (f"{CUDA}{colon}{numbers}", CPU))

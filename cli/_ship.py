"""What follows the narrowing on the way to a server: options, and the lines that say how it went."""

from __future__ import annotations

from pathlib import Path

import click

from . import _options as options

recipe_option = click.option(
    "--save-recipe",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep all choices in a file, .yaml or .json, for `onnxgrail apply`.",
)

ship_options = options.chain(recipe_option)

"""Select the blocks that a recipe narrows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxgrail.core import Block, Recipe
from onnxgrail.recipe.patterns import Pattern


def selected(blocks: Sequence[Block], recipe: Recipe) -> tuple[Block, ...]:
    """Return the blocks of the chosen kinds with a name that matches `include` and no name that matches `exclude`.

    The names of a block are its own name and those of its nodes.

    Raises:
        UsageError: a pattern is not a regular expression.
    """
    if "grail" not in recipe.method or recipe.only_bits:
        return ()
    wanted = named(recipe)
    return tuple(b for b in blocks if b.kind in recipe.blocks and wanted((b.name, *b.nodes)))


def named(recipe: Recipe) -> Callable[[Sequence[str]], bool]:
    """Return a function that is True for names of which one matches `include` and none matches `exclude`.

    Raises:
        UsageError: a pattern is not a regular expression.
    """
    include, exclude = (
        None if text is None else Pattern(option, text)
        for option, text in (("include", recipe.include), ("exclude", recipe.exclude))
    )

    def wanted(names: Sequence[str]) -> bool:
        return (include is None or include.matches(names)) and (exclude is None or not exclude.matches(names))

    return wanted

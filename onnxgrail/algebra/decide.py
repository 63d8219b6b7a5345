"""Decide one block at one width, with the methods that a recipe names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from onnxgrail.algebra.fit.compensate import COMPENSATORS, Compensator
from onnxgrail.algebra.fit.compensate.plain import Plain
from onnxgrail.algebra.method import reduce_and_compensate, reduced
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select import selectors
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.core import INNER, Block, BlockError, Change, Floats, Recipe, Reducer, Selector, View


def decided(view: View, kept: int, recipe: Recipe, selector: Selector, *, fitted: bool = False) -> Change:
    """Decide one block at one width.

    Args:
        view: the block with its weights and statistics.
        kept: the new width.
        recipe: names the reducer and the compensator.
        selector: scores the units.
        fitted: the consumers are fitted later, so that they are not compensated here.
    """
    reducer = REDUCERS[recipe.reducer]
    change = reduce_and_compensate(
        view,
        kept,
        selector=_selector(view, selector),
        reducer=reducer,
        compensator=Plain(measured=False) if fitted else _compensator(recipe, view.block),
        rng=_random(recipe, view),
    )
    scored = reducer.needs_scores and kept < view.block.units and not view.block.ranked
    return dataclasses.replace(change, selector=selectors.taken(recipe.selector, view)) if scored else change


def error_at(view: View, kept: int, recipe: Recipe, selector: Selector) -> float:
    """Return the relative squared error of the consumers' outputs at one width; 0 if they are all zero.

    It comes from some of the outputs if the compensator can do that, and costs less than a decision.
    """
    factory, rng = REDUCERS[recipe.reducer], _random(recipe, view)
    reducer = reduced(view, kept, selector=_selector(view, selector), reducer=factory, rng=rng)
    if kept == view.block.units:
        return 0.0
    compensator = _compensator(recipe, view.block)
    brief: Callable[[View, Reducer], BlockError] | None = getattr(compensator, "error", None)  # plug-ins have none
    error = compensator(view, reducer).error if brief is None else brief(view, reducer)
    return (error.plain if error.compensated is None else error.compensated) or 0.0


def scores_of(recipe: Recipe, view: View) -> Floats:
    """Return the scores (u,) of a block's units by the recipe's selector."""
    return np.asarray(SELECTORS[recipe.selector](view, _random(recipe, view)))


def _random(recipe: Recipe, view: View) -> np.random.Generator:
    return np.random.default_rng((recipe.seed, int(view.block.ids[0])))


def _selector(view: View, selector: Selector) -> Selector:
    """Return what scores the units of a block: their order if it is in a basis of its own."""
    return _first if view.block.ranked else selector


def _first(view: View, rng: np.random.Generator) -> Floats:  # noqa: ARG001  the interface of a selector
    """Score units by their order."""
    return -np.arange(view.block.units, dtype=np.float64)


def _compensator(recipe: Recipe, block: Block) -> Compensator:
    """Return the chosen compensator with the recipe's ridge parameter; none for channels inside heads.

    Queries and keys have no consumer. The basis of values is that in which the least is lost without compensation, and
    other heads, of which values vary little within a sample, would seem to repair on few samples what they do not.
    """
    if block.kind in INNER:
        return Plain()
    chosen: Any = COMPENSATORS[recipe.compensate]
    fields = {f.name for f in dataclasses.fields(chosen)}  # plug-ins are wrapped and keep their own ridge parameter
    compensator: Compensator = dataclasses.replace(chosen, alpha=recipe.ridge) if "alpha" in fields else chosen
    return compensator


def needs_data(recipe: Recipe) -> bool:
    """Return True if a method of the recipe reads activations."""
    reducer = REDUCERS[recipe.reducer]
    selecting = reducer.needs_scores and SELECTORS[recipe.selector].needs_data
    return selecting or reducer.needs_data or COMPENSATORS[recipe.compensate].needs_data


def reads_producers(recipe: Recipe) -> bool:
    """Return True if decisions may read weights of a block that are not its consumers'."""
    methods = SELECTORS[recipe.selector], REDUCERS[recipe.reducer], COMPENSATORS[recipe.compensate]
    return not all(getattr(method, "consumers_only", False) for method in methods)


def needs_gram(recipe: Recipe, block: Block) -> bool:
    """Return True if selecting units of a block needs products of its channels."""
    reducer = REDUCERS[recipe.reducer]
    return reducer.needs_data or (
        reducer.needs_scores and not block.ranked and selectors.needs_gram_of(recipe.selector, block)
    )

"""Check keyword choices and make a `Recipe` of them; messages name the option."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.calibration.feeds.reading import numbers
from onnxgrail.core import FITS, GRASP_RANKS, KINDS, METHODS, NORMS, QUANTIZE, REFINES, Recipe
from onnxgrail.errors import UsageError
from onnxgrail.machine.amounts import METRICS, cache_bytes, target_of
from onnxgrail.recipe.keywords import check_gone
from onnxgrail.recipe.plugins import look_up
from onnxgrail.recipe.selection import ALLOCATIONS, TARGETS


def _words(value: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(w for w in value.split(",") if w) if isinstance(value, str) else tuple(value)


def _names(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _layers(value: int | str | Iterable[str]) -> str:
    return str(value) if isinstance(value, int | str) else ",".join(value)


AMOUNTS = ("ratio", "unit_ratio", *(f"target_{metric}" for metric in METRICS))  # at most one sets how much is removed
READ: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("blocks", "fit", "refine", "method"), _words),
    **dict.fromkeys(("image_mean", "image_std"), numbers),
    "grasp_layers": _layers,
    "providers": _names,
    "tokenizer": os.fspath,
    "cache_budget": str,
}
"""Functions that convert a user's value to the type of the recipe's field."""


def recipe_of(choices: Mapping[str, Any]) -> Recipe:
    """Return the recipe of keyword choices; the others keep their defaults.

    Raises:
        UsageError: an unknown name, or a value out of range.
    """
    known = {f.name for f in dataclasses.fields(Recipe)}
    for name in choices:
        if name not in known:
            check_gone(name, f"there is no option {name!r} any more")
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            meant = f"Did you mean {close[0]!r}? " if close else ""
            raise UsageError(f"there is no option {name!r}", hint=f"{meant}Known options: {', '.join(sorted(known))}")
    given = {n: v for n, v in choices.items() if v is not None or n in ("include", "exclude", "samples", "min_cosine")}
    for name, read in READ.items():
        if given.get(name) is not None:
            given[name] = read(given[name])
    if given.get("refine") == ("none",):
        given["refine"] = ()
    if "ic" in given.get("method", ()):  # it compensates after the other methods and refinements, so it comes last
        given["method"] = (*(m for m in given["method"] if m != "ic"), "ic")
        given["method"] = ("grail", "ic") if given["method"] == ("ic",) else given["method"]
        given["refine"] = (*(k for k in given.get("refine", ()) if k != "ic"), "ic")
    _ruled(given)
    recipe = Recipe(**given)
    _check(recipe)
    return recipe


def merged(choices: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Any]:
    """Return choices updated with others; a ratio or target among the new ones replaces all ratios and targets."""
    ruled = any(instead.get(name) is not None for name in AMOUNTS)
    return {**{name: value for name, value in choices.items() if not (ruled and name in AMOUNTS)}, **instead}


def _ruled(given: dict[str, Any]) -> None:
    """Check that at most one ratio or target is given, and unset the default ratio if it is another one.

    Raises:
        UsageError: several are given.
    """
    rulers = [name for name in AMOUNTS if name in given]
    targets = [name for name in rulers if name.startswith("target_")]
    if len(rulers) > 1:
        names = " and ".join(map(_option, rulers))
        raise UsageError(f"{names} exclude each other", hint="Give one of them")
    for name in targets:
        value = given[name]
        given[name] = f"{value:f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    if rulers and rulers != ["ratio"]:
        given["ratio"] = None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(recipe: Recipe) -> None:
    target_of(recipe)
    cache_bytes(recipe)
    _among("allocate", recipe.allocate, ALLOCATIONS)
    for name in ("ratio", "unit_ratio"):
        share = getattr(recipe, name)
        if share is not None and not 0 <= share < 1:
            raise UsageError(f"{name} must be at least 0 and below 1, got {share:g}", hint="1 would remove everything")
    for block in recipe.blocks:
        _among("blocks", block, KINDS)
    if not recipe.blocks:
        raise UsageError("no kind of block is chosen", hint=f"Choose from {', '.join(KINDS)}")
    look_up("selector", recipe.selector)
    look_up("compensate", recipe.compensate)
    _among("selector", recipe.selector, SELECTORS)
    _among("reducer", recipe.reducer, REDUCERS)
    _among("compensate", recipe.compensate, COMPENSATORS)
    _among("norms", recipe.norms, NORMS)
    for word in recipe.fit:
        _among("fit", word, FITS)
    _check_shipping(recipe)
    for kind in recipe.refine:
        _among("refine", kind, REFINES)
    if len(set(recipe.refine)) < len(recipe.refine):
        raise UsageError(
            f"refine cannot be {','.join(recipe.refine)}", hint=f"Choose from {', '.join(REFINES)}, each once"
        )
    _check_methods(recipe)
    _check_numbers(recipe)


def _check_numbers(recipe: Recipe) -> None:
    if recipe.budget_seconds is not None and not recipe.budget_seconds > 0:
        raise UsageError(f"budget_seconds must be above 0, got {recipe.budget_seconds:g}")
    for name in ("batch_size", "round_to"):
        if getattr(recipe, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(recipe, name)}")
    if recipe.samples is not None and recipe.samples < 1:
        raise UsageError(f"samples must be at least 1, got {recipe.samples}")
    for name in ("ridge", "seed"):
        if getattr(recipe, name) < 0:
            raise UsageError(f"{name} must not be negative, got {getattr(recipe, name):g}")
    if recipe.min_cosine is not None:
        _check_gate(recipe.min_cosine, check=recipe.check)


def _check_gate(limit: float, *, check: bool) -> None:
    if not -1 <= limit <= 1:
        raise UsageError(f"min_cosine must be between -1 and 1, got {limit:g}")
    if not check:
        raise UsageError(
            "min_cosine needs the check that check=False (--no-check) turns off", hint="Leave one of them out"
        )


def _check_shipping(recipe: Recipe) -> None:
    _among("quantize", recipe.quantize, QUANTIZE)
    if recipe.target is not None:
        _among("target", recipe.target, TARGETS)
    elif recipe.strict:
        raise UsageError("--strict needs --target", hint=f"Choose from {', '.join(TARGETS)}")


def _check_methods(recipe: Recipe) -> None:
    for name in recipe.method:
        _among("method", name, METHODS)
    if recipe.ic_rank is not None and recipe.ic_rank < 1:
        raise UsageError(f"ic_rank must be at least 1, got {recipe.ic_rank}")
    if not recipe.method:
        raise UsageError("no method is chosen", hint=f"Choose from {', '.join(METHODS)}")
    if target_of(recipe) is not None and "grail" not in recipe.method:
        raise UsageError(f"{_option('target')}-* needs --method grail", hint="Without it, --ratio says how much goes")
    if recipe.unit_ratio is not None and "grail" not in recipe.method:
        hint = "Without it, --ratio says which share of the parameters in layers goes"
        raise UsageError(f"{_option('unit_ratio')} needs --method grail", hint=hint)
    _among("grasp_rank", recipe.grasp_rank, GRASP_RANKS)
    if not 0 < recipe.grasp_retain < 1:
        raise UsageError(f"grasp_retain must be above 0 and below 1, got {recipe.grasp_retain:g}")
    if recipe.grasp_layers is not None and "grasp" not in recipe.method:
        raise UsageError("--grasp-layers needs --method grasp")
    if "grasp" in recipe.method and "grail" in recipe.method and recipe.grasp_layers is None:
        hint = "Give --grasp-layers: --ratio is the share that narrowing removes"
        raise UsageError("--method grail,grasp does not say how many layers are replaced", hint=hint)


def _among(option: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        check_gone(value, f"{option} has no {value!r} any more")
        raise UsageError(f"{option} has no {value!r}", hint=f"Choose from {', '.join(known)}")

"""Check keyword choices and make a `Recipe` of them; messages name the option."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.errors import UsageError, meant
from onnxgrail.machine.amounts import cache_bytes, target_of
from onnxgrail.options import LAYERS_RATIO, MAX_LOSS, Recipe
from onnxgrail.recipe import keywords
from onnxgrail.recipe.choices import Options
from onnxgrail.recipe.effort import filled
from onnxgrail.recipe.plugins import GROUPS, look_up
from onnxgrail.recipe.table import AMOUNTS, FIELDS
from onnxgrail.recipe.table.option import SHARE, Option, spelled

REGISTRIES: Mapping[str, Collection[str]] = {"selector": SELECTORS, "reducer": REDUCERS, "compensate": COMPENSATORS}
"""Allowed words that plug-ins and other programs can add to."""
ELSEWHERE = {
    "device": "Give providers=('CUDAExecutionProvider',) for a GPU",
    "recipe": "Call onnxgrail.apply(recipe, model, output)",
}
"""Hints for words of the command line that are no keywords."""
DATA = ("data", "held_out")  # keywords beside the options
DEFAULTS = Recipe()


def recipe_of(choices: Mapping[str, Any]) -> Recipe:
    """Return the recipe of keyword choices; the others keep their defaults.

    Raises:
        UsageError: an unknown name, or a value of the wrong type or out of range.
    """
    for name in choices:
        if name not in FIELDS:
            keywords.check_gone(name, f"there is no option {name!r} any more")
            if name in ELSEWHERE:
                raise UsageError(f"there is no option {name!r} in Python", hint=ELSEWHERE[name])
            known = sorted({*FIELDS, *Options.__annotations__, *DATA})
            hint = f"{meant(name, known, 0.5)} Known options: {', '.join(known)}".lstrip()
            raise UsageError(f"there is no option {name!r}", hint=hint)
    read = {name: keywords.read(name, value) for name, value in choices.items() if value is not None}
    nothing = {name: (row.value.empty,) for name, row in FIELDS.items() if row.value.empty}
    given: dict[str, Any] = {name: () if value == nothing.get(name) else value for name, value in read.items()}
    if "ic" in given.get("method", ()):  # it compensates after the other methods and refinements, so it comes last
        given["method"] = (*(m for m in given["method"] if m != "ic"), "ic")
        given["method"] = ("grail", "ic") if given["method"] == ("ic",) else given["method"]
        given["refine"] = (*(k for k in given.get("refine", ()) if k != "ic"), "ic")
    _ruled(given)
    recipe = Recipe(**filled(given))
    _check(recipe)
    return recipe


def merged(choices: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Any]:
    """Return choices updated with others; a ratio or target among the new ones replaces all ratios and targets."""
    ruled = any(instead.get(name) is not None for name in AMOUNTS)
    return {**{name: value for name, value in choices.items() if not (ruled and name in AMOUNTS)}, **instead}


def _ruled(given: dict[str, Any]) -> None:
    """Check that at most one amount is given, and add the default if there is none.

    Raises:
        UsageError: several are given.
    """
    rulers = [name for name in AMOUNTS if name in given]
    if len(rulers) > 1:
        words = [FIELDS[name].spelled if FIELDS[name].commands else name for name in rulers]
        raise UsageError(f"{' and '.join(words)} exclude each other", hint="Give one of them")
    if not rulers:
        narrows = "grail" in given.get("method", ("grail",))
        given |= {"max_loss": MAX_LOSS} if narrows else {"ratio": LAYERS_RATIO}


def _check(recipe: Recipe) -> None:
    target_of(recipe)
    cache_bytes(recipe)
    for name, row in FIELDS.items():
        value = getattr(recipe, name)
        value = tuple(value.values()) or None if isinstance(value, Mapping) else value
        if row.value.words and value is not None:
            _check_words(row, value)
        elif isinstance(value, int | float) and not row.value.allows(value):
            hint = "1 would remove everything" if row.value == SHARE else ""
            percent = f"For {value:g} percent write {value:g}%; {value:.0%} would allow any loss"
            hint = percent if row.value.kind == "portion" and value >= 1 else hint
            raise UsageError(f"{name} must be {row.value.limits}, got {value:.12g}", hint=hint)
        elif value == () and getattr(DEFAULTS, name):
            raise UsageError(f"{name} is empty", hint="Leave it out for the default")
    if len(set(recipe.refine)) < len(recipe.refine):
        hint = f"Choose from {', '.join(FIELDS['refine'].value.words)}, each once"
        raise UsageError(f"refine cannot be {','.join(recipe.refine)}", hint=hint)
    _check_methods(recipe)
    if recipe.max_loss is not None and recipe.allocate != "auto":
        hint = "Give --ratio, --unit-ratio or a target, or leave out --allocate"
        raise UsageError(f"--allocate {recipe.allocate} distributes a given amount, and --max-loss has none", hint=hint)
    if recipe.block_size & (recipe.block_size - 1):
        raise UsageError(f"block_size must be a power of two, got {recipe.block_size}", hint="Give --block-size 32")
    if recipe.accuracy_level not in (0, 1, 4):
        hint = "Levels 2 and 3 compute in half precision, which --quantize fp16 is for"
        raise UsageError(f"accuracy_level must be 0, 1 or 4, got {recipe.accuracy_level}", hint=hint)
    _check_bits(recipe)
    if recipe.strict and recipe.target is None:
        raise UsageError("--strict needs --target", hint=f"Choose from {', '.join(FIELDS['target'].value.words)}")
    if recipe.min_cosine is not None and not recipe.check:
        raise UsageError(
            "min_cosine needs the check that check=False (--no-check) turns off", hint="Leave one of them out"
        )


def _check_bits(recipe: Recipe) -> None:
    if recipe.bits is not None and (recipe.widths is None or recipe.quantize != "none"):
        raise UsageError("bits need widths, and no --quantize", hint="`frontier --save-recipes` writes both")
    if recipe.only_bits and recipe.only_widths:
        raise UsageError("--only-bits and --only-widths exclude each other", hint="Without both, both are decided")
    option = "--only-bits" if recipe.only_bits else "--only-widths" if recipe.only_widths else ""
    if option and not recipe.wants_size:
        hint = "Give --minimize size, or --target-size (compress)"
        raise UsageError(f"{option} needs an amount of bytes", hint=hint)
    if option and recipe.quantize != "none":
        hint = f"Leave out one of them; --ratio 0 --quantize {recipe.quantize} quantizes and removes nothing"
        raise UsageError(f"{option} and --quantize {recipe.quantize} exclude each other", hint=hint)


def _check_words(row: Option, value: str | tuple[str, ...]) -> None:
    """Check that a word, or each of several, is known.

    Raises:
        UsageError: one is not, or none is given and one is needed.
    """
    if row.name in GROUPS:
        look_up(row.name, str(value))
    known = REGISTRIES.get(row.name, row.value.words)
    for word in (value,) if isinstance(value, str) else value:
        if word not in known:
            keywords.check_gone(word, f"{row.name} has no {word!r} any more")
            raise UsageError(f"{row.name} has no {word!r}", hint=f"Choose from {', '.join(known)}")
    if not value and not row.value.empty:
        raise UsageError(f"{row.name} is empty", hint=f"Choose from {', '.join(known)}")


def _check_methods(recipe: Recipe) -> None:
    if target_of(recipe) is not None and "grail" not in recipe.method:
        raise UsageError(f"{spelled('target')}-* needs --method grail", hint="Without it, --ratio says how much goes")
    if recipe.unit_ratio is not None and "grail" not in recipe.method:
        hint = "Without it, --ratio says which share of the parameters in layers goes"
        raise UsageError(f"{spelled('unit_ratio')} needs --method grail", hint=hint)
    if recipe.widths is not None and "grail" not in recipe.method:
        raise UsageError("widths need --method grail", hint="Without it, --ratio says how much goes")
    if recipe.max_loss is not None and "grail" not in recipe.method:
        raise UsageError("--max-loss needs --method grail", hint="Without it, --ratio says how much goes")
    if recipe.grasp_layers is not None and "grasp" not in recipe.method:
        raise UsageError("--grasp-layers needs --method grasp")
    if "grasp" in recipe.method and "grail" in recipe.method and recipe.grasp_layers is None:
        hint = "Give --grasp-layers: --ratio is the share that narrowing removes"
        raise UsageError("--method grail,grasp does not say how many layers are replaced", hint=hint)

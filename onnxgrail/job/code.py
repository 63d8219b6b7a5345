"""Checksums of code that is not ours: a run is only continued with the same."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import CodeType, ModuleType
from typing import Any

import numpy as np

from onnxgrail.core import Recipe
from onnxgrail.recipe.plugins import GROUPS, Foreign
from onnxgrail.registry import REFINEMENTS, is_ours, module_of

OURS = "onnxgrail."
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def code_of(recipe: Recipe, metric: Any) -> dict[str, str]:
    """Return checksums of the plug-ins that a recipe names, and of the user's own loss, None if there is none."""
    used = {option: known[getattr(recipe, option)] for option, (_, known) in GROUPS.items()}
    used |= {f"refine {name}": REFINEMENTS[name] for name in recipe.refine}
    inner = {name: one.inner if isinstance(one, Foreign) else one for name, one in used.items()}
    found = {f"code of {name}": key_of(one) for name, one in inner.items() if not is_ours(one)}
    return found if metric is None else {**found, "code of metric": key_of(metric)}


def packages() -> dict[str, str]:
    """Return the versions of the packages with plug-ins, whose rules for operators may be used."""
    groups = metadata.entry_points()
    found = [one.dist for name in groups.groups if name.startswith(OURS) for one in groups.select(group=name)]
    return {dist.name: dist.version for dist in found if dist is not None}


def key_of(thing: Any) -> str:
    """Return the SHA-256 checksum of an object: its code, that of its module which it calls, and its values."""
    digest = hashlib.sha256()
    for text in _parts(thing, module_of(thing), {}):
        digest.update(text if isinstance(text, bytes) else text.encode())
    return digest.hexdigest()


def _parts(thing: Any, module: str, seen: dict[int, Any]) -> Iterator[str | bytes]:
    """Yield what an object consists of; what other modules define is named only."""
    if isinstance(thing, PLAIN):
        yield f"{type(thing).__name__} {thing!r};"
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing  # kept, or another object could get its number
    yield f"{type(thing).__qualname__} {getattr(thing, '__qualname__', '')};"
    for part in _inside(thing, module):
        yield from (part,) if isinstance(part, bytes) else _parts(part, module, seen)


def _inside(thing: Any, module: str) -> Iterator[Any]:
    """Yield the objects, or bytes, inside of an object."""
    if isinstance(thing, np.ndarray):
        yield from (str(thing.dtype), thing.shape)
        yield thing.tolist() if thing.dtype == object else thing.tobytes()
    elif isinstance(thing, Mapping):
        yield from (part for item in thing.items() for part in item)
    elif isinstance(thing, set | frozenset):
        yield from sorted(thing, key=repr)
    elif isinstance(thing, list | tuple):
        yield from thing
    elif isinstance(thing, CodeType):
        yield from (thing.co_code, thing.co_names, thing.co_consts)
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif inspect.ismethod(thing):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, ModuleType) or module_of(thing) != module:
        yield getattr(thing, "__name__", module_of(thing))
    elif inspect.isfunction(thing):
        yield from (thing.__code__, thing.__defaults__, thing.__kwdefaults__)
        yield from (cell.cell_contents for cell in thing.__closure__ or ())
        yield from (thing.__globals__.get(name) for name in thing.__code__.co_names)
    elif isinstance(thing, type):
        yield from (value for name, value in vars(thing).items() if not _hidden(name))
        yield from thing.__bases__
    else:
        yield from (type(thing), getattr(thing, "__dict__", None))
        yield from (getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ()))


def _hidden(name: str) -> bool:
    """Return True for attributes of a class that every class has."""
    return name in {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__"}

"""What is exported: a module with inputs that it takes, and which of their axes stay open."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from onnxgrail.errors import MissingExtraError, ModelError

Tensor = Any  # torch has no types here
Axes = Mapping[str, Mapping[int, str]]
Shapes = Mapping[str, tuple[int, ...]]


def torch() -> ModuleType:
    """The torch module.

    Raises:
        MissingExtraError: not installed.
    """
    try:
        import torch as found
    except ImportError as error:
        raise MissingExtraError("export needs torch, which is not installed", hint=install("torch")) from error
    module: ModuleType = found
    return module


def install(extra: str) -> str:
    """The fix for a package that is missing."""
    return f"Run: pip install 'onnxgrail[{extra}]'"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Subject:
    """A module, ready to be called.

    Attributes:
        name: what messages call it.
        module: in evaluation mode.
        arguments: by name, in the order of the call; what is no tensor is part of the model.
        positional: whether arguments are passed in order, and not by name.
        nested: arguments that hold tensors inside, with names of `arguments` in their places; the parts of one stand
            where it would stand.
        axes: by input, which axes are open and what they are called.
        guessed: the axes are a guess, that may be given up.
        notes: what was assumed.
    """

    name: str
    module: Any
    arguments: Mapping[str, Any]
    positional: bool = False
    nested: Mapping[str, Any] = field(default_factory=dict)
    axes: Axes = field(default_factory=dict)
    guessed: bool = True
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The arguments that are tensors."""
        return {name: value for name, value in self.arguments.items() if is_tensor(value)}

    def labels(self) -> list[str]:
        """Names of open axes, each once."""
        return list(dict.fromkeys(label for axes in self.axes.values() for label in axes.values()))


def is_tensor(value: object) -> bool:
    """Whether a value is a tensor of torch."""
    return isinstance(value, torch().Tensor)


def subject(name: str, module: Any, inputs: Any, **more: Any) -> Subject:
    """A module with its example inputs: a tensor, several in the order of `forward`, or a mapping by name.

    Raises:
        ModelError: no module, or inputs that `forward` does not take.
    """
    check_module(name, module)
    positional = not isinstance(inputs, Mapping)
    given = inputs if isinstance(inputs, Mapping | tuple | list) else (inputs,)
    arguments = {str(key): _tensor(value) for key, value in given.items()} if isinstance(given, Mapping) else {}
    parameters = inspect.signature(module.forward).parameters
    if positional:
        values = [_tensor(value) for value in given]
        arguments = dict(zip(_names(parameters, len(values), name), values, strict=True))
    unknown = [key for key in arguments if key not in parameters]
    if unknown and not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        takes = ", ".join(parameters) or "nothing"
        raise ModelError(f"{name}: forward takes {takes}, and not {', '.join(map(repr, unknown))}")
    nested = {key: _Part(key, value) for key, value in arguments.items() if _holds_tensors(value)}
    flat = {part: leaf for key, value in arguments.items() for part, leaf in _leaves(key, value)}
    if not any(map(is_tensor, flat.values())):
        raise ModelError(f"{name}: no tensor among the example inputs", hint="Return (module, inputs)")
    return Subject(name=name, module=module.eval(), arguments=flat, positional=positional, nested=nested, **more)


def _names(parameters: Mapping[str, inspect.Parameter], count: int, name: str) -> list[str]:
    names: list[str] = []
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{number}" for number in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    if len(names) < count:
        raise ModelError(f"{name}: {count} example inputs, but forward takes {', '.join(names) or 'none'}")
    return names[:count]


def caller(subject: Subject) -> Callable[..., dict[str, Tensor]]:
    """The module as a function from its tensors, in order, to its outputs by name.

    What calls it may replace `forward` of the module, so the original is held here.
    """
    forward, names = subject.module.forward, list(subject.inputs)

    def call(*tensors: Tensor) -> dict[str, Tensor]:
        values = {**subject.arguments, **dict(zip(names, tensors, strict=True))}
        made = forward(*values.values()) if subject.positional else forward(**values)
        outputs = {}
        for name, value in _flat("", made):
            outputs[f"{name}_out" if name in names else name or "output"] = value
        return outputs

    return call


def _flat(name: str, made: Any) -> list[tuple[str, Tensor]]:
    """Every tensor in an output, by the way to it; caches and other objects are left out."""
    if is_tensor(made):
        return [(name, made)]
    found: Sequence[tuple[str, Any]] = ()
    if isinstance(made, Mapping):
        found = [(str(key), value) for key, value in made.items()]
    elif isinstance(made, tuple) and hasattr(made, "_fields"):
        found = list(zip(made._fields, made, strict=True))
    elif isinstance(made, tuple | list):
        found = [(str(number) if name else f"output_{number}", value) for number, value in enumerate(made)]
    return [pair for key, value in found for pair in _flat(f"{name}_{key}" if name else key, value)]


def replaced(subject: Subject, arguments: Mapping[str, Any]) -> Subject:
    """The same module with other inputs."""
    return replace(subject, arguments=arguments)


@contextlib.contextmanager
def quiet(*, printed: bool = True) -> Iterator[None]:
    """Neither warnings nor log lines, nor (with `printed`) what is printed: what matters comes as an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if printed:
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.disable(before)

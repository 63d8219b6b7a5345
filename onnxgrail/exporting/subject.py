"""What is exported: a module with inputs that it takes, and which of their axes stay open."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
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
        takes: what `forward` takes, by name, with a `Part` wherever one of the arguments stands: in lists and mappings
            of tensors, each is an input.
        axes: by input, which axes are open and what they are called.
        guessed: the axes are a guess, that may be given up.
        notes: what was assumed.
    """

    name: str
    module: Any
    arguments: Mapping[str, Any]
    positional: bool = False
    takes: Mapping[str, Any] = field(default_factory=dict)
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
    arguments = {str(key): value for key, value in given.items()} if isinstance(given, Mapping) else {}
    parameters = inspect.signature(module.forward).parameters
    if positional:
        arguments = dict(zip(_names(parameters, len(given), name), given, strict=True))
    unknown = [key for key in arguments if key not in parameters]
    if unknown and not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        takes = ", ".join(parameters) or "nothing"
        raise ModelError(f"{name}: forward takes {takes}, and not {', '.join(map(repr, unknown))}")
    flat: dict[str, Any] = {}
    parts = {key: _apart(key, value, flat) for key, value in arguments.items()}
    if not any(map(is_tensor, flat.values())):
        raise ModelError(f"{name}: no tensor among the example inputs", hint="Return (module, inputs)")
    return Subject(name=name, module=module.eval(), arguments=flat, positional=positional, takes=parts, **more)


def check_module(name: str, module: Any) -> None:
    """Whether something is a module that can be exported.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(module, torch().nn.Module):
        kind = type(module).__name__
        raise ModelError(f"{name} gave a {kind}, expected a torch module", hint="Return module, or (module, inputs)")
    if isinstance(module, torch().jit.ScriptModule):
        raise ModelError(f"{name} is TorchScript already", hint="Export the module that it was made from")


def _tensor(value: Any) -> Any:
    """Arrays become tensors; everything else stays."""
    return torch().from_numpy(value) if type(value).__module__ == "numpy" and hasattr(value, "ndim") else value


@dataclass(frozen=True, slots=True)
class Part:
    """The place of an argument in what `forward` takes."""

    name: str


def _apart(name: str, value: Any, flat: dict[str, Any]) -> Any:
    """What stands for a value in the call; all that it holds goes into `flat`, by the way to it."""
    if _holds(value) and isinstance(value, Mapping):
        return {key: _apart(f"{name}_{key}", part, flat) for key, part in value.items()}
    if _holds(value) and isinstance(value, tuple | list):
        return _like(value, [_apart(f"{name}_{number}", part, flat) for number, part in enumerate(value)])
    if name in flat:
        raise ModelError(f"two inputs would be called {name!r}", hint="Rename an argument of forward")
    flat[name] = _tensor(value)
    return Part(name)


def _holds(value: Any) -> bool:
    """Whether there are tensors in a list or mapping."""
    if isinstance(value, Mapping | tuple | list):
        parts = value.values() if isinstance(value, Mapping) else value
        return any(is_tensor(_tensor(part)) or _holds(part) for part in parts)
    return False


def _like(kind: Any, parts: list[Any]) -> Any:
    """A list, a tuple, or a tuple with names."""
    return type(kind)(*parts) if hasattr(kind, "_fields") else type(kind)(parts)


def _whole(template: Any, values: Mapping[str, Any]) -> Any:
    """What `forward` takes, out of its parts."""
    if isinstance(template, Part):
        return values[template.name]
    if isinstance(template, Mapping):
        return {key: _whole(part, values) for key, part in template.items()}
    return _like(template, [_whole(part, values) for part in template])


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
        wanted = {key: _whole(template, values) for key, template in subject.takes.items()}
        made = forward(*wanted.values()) if subject.positional else forward(**wanted)
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
    elif is_dataclass(made) and not isinstance(made, type):
        found = [(entry.name, getattr(made, entry.name)) for entry in fields(made)]
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

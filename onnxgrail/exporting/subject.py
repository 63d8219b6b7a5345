"""The subject of an export: a module with example inputs and open axes."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import ModuleType
from typing import Any

from onnxgrail.errors import ModelError
from onnxgrail.machine.extras import extra

Tensor = Any  # torch is optional, so its types are not available
Axes = Mapping[str, Mapping[int, str]]
Shapes = Mapping[str, tuple[int, ...]]


def torch() -> ModuleType:
    """Import and return torch.

    Raises:
        MissingExtraError: torch is not installed.
    """
    module: ModuleType = extra("torch", "torch", "export needs torch")
    return module


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Subject:
    """A module with arguments for a call.

    Attributes:
        name: its name in messages.
        module: the module in evaluation mode.
        arguments: by name, in the order of the call; those that are not tensors become part of the model.
        positional: True if arguments are passed by position instead of by name.
        takes: the arguments of `forward` by name, with a `Part` for each entry of `arguments`: every tensor in lists
            and mappings is an input.
        axes: names of the open axes, by input.
        notes: notes on assumptions.
    """

    name: str
    module: Any
    arguments: Mapping[str, Any]
    positional: bool = False
    takes: Mapping[str, Any] = field(default_factory=dict)
    axes: Axes = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the arguments that are tensors."""
        return {name: value for name, value in self.arguments.items() if is_tensor(value)}

    def labels(self) -> list[str]:
        """Return the names of open axes without duplicates."""
        return list(dict.fromkeys(label for axes in self.axes.values() for label in axes.values()))


def is_tensor(value: object) -> bool:
    """Return True if a value is a torch tensor."""
    return isinstance(value, torch().Tensor)


def subject(name: str, module: Any, inputs: Any, **more: Any) -> Subject:
    """Make a subject from a module and its example inputs.

    Args:
        name: its name in messages.
        module: the module.
        inputs: a tensor, several in the order of `forward`, or a mapping by name.
        **more: other attributes of the subject.

    Raises:
        ModelError: not a module, or inputs that `forward` does not accept.
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
    """Check that a value is a module that can be exported.

    Raises:
        ModelError: it is not.
    """
    if not isinstance(module, torch().nn.Module):
        kind = type(module).__name__
        raise ModelError(f"{name} gave a {kind}, expected a torch module", hint="Return module, or (module, inputs)")
    if isinstance(module, torch().jit.ScriptModule):
        raise ModelError(f"{name} is TorchScript already", hint="Export the module that it was made from")


def _tensor(value: Any) -> Any:
    """Convert an array to a tensor; return other values unchanged."""
    return torch().from_numpy(value) if type(value).__module__ == "numpy" and hasattr(value, "ndim") else value


@dataclass(frozen=True, slots=True)
class Part:
    """The place of an argument within the arguments of `forward`."""

    name: str


def _apart(name: str, value: Any, flat: dict[str, Any]) -> Any:
    """Return the template of a value for the call; store its contents in `flat`, named by their path."""
    if _holds(value) and isinstance(value, Mapping):
        return {key: _apart(f"{name}_{key}", part, flat) for key, part in value.items()}
    if _holds(value) and isinstance(value, tuple | list):
        return _like(value, [_apart(f"{name}_{number}", part, flat) for number, part in enumerate(value)])
    if name in flat:
        raise ModelError(f"two inputs would be called {name!r}", hint="Rename an argument of forward")
    flat[name] = _tensor(value)
    return Part(name)


def _holds(value: Any) -> bool:
    """Return True if a list or mapping contains tensors."""
    if isinstance(value, Mapping | tuple | list):
        parts = value.values() if isinstance(value, Mapping) else value
        return any(is_tensor(_tensor(part)) or _holds(part) for part in parts)
    return False


def _like(kind: Any, parts: list[Any]) -> Any:
    """Return a list, a tuple or a named tuple like `kind`."""
    return type(kind)(*parts) if hasattr(kind, "_fields") else type(kind)(parts)


def _whole(template: Any, values: Mapping[str, Any]) -> Any:
    """Return an argument of `forward`, assembled from its parts."""
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
    """Return the module as a function from its tensors, in order, to its outputs by name.

    Its caller may replace the module's `forward`, so the function keeps the original.
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
    """Return every tensor in an output, named by its path; caches and other objects are left out."""
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


@contextlib.contextmanager
def quiet(*, printed: bool = True) -> Iterator[None]:
    """Suppress warnings, log messages and, with `printed`, output; errors are exceptions."""
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

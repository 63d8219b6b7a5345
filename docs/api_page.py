"""Write `docs/api.md` from `docs/templates/api.md` and the docstrings: `python docs/api_page.py`."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import onnxgrail
import onnxgrail.options

DOCS = Path(__file__).resolve().parent
FIRST = (
    "compress",
    "inspect",
    "compare",
    "refine_model",
    "demo",
    "join",
    "Result",
    "Report",
    "Inspection",
    "Comparison",
)
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")

Definition = ast.FunctionDef | ast.ClassDef


def page() -> str:
    """Return the page: examples, then functions, classes and errors."""
    names = [name for name in onnxgrail.__all__ if not name.startswith("_")]
    order = {name: place for place, name in enumerate(FIRST)}
    errors = [name for name in names if name.endswith("Error")]
    others = sorted(set(names) - set(errors), key=lambda name: (name[0].isupper(), order.get(name, len(order)), name))
    text = "\n".join(section(name) for name in others) + "\n## Errors\n\n" + "".join(map(error, errors))
    template = (DOCS / "templates" / "api.md").read_text(encoding="utf-8")
    return template.replace("{{reference}}\n", text)


def definition(name: str) -> Definition:
    """Return the syntax tree of a public name; it keeps defaults as they are written."""
    return defined(getattr(onnxgrail, name))


def defined(thing: Any) -> Definition:
    """Return the syntax tree of a function or class."""
    name, body = thing.__name__, parsed(thing.__module__).body
    return next(node for node in body if isinstance(node, Definition) and node.name == name)


def methods(name: str) -> list[ast.FunctionDef]:
    """Return the public methods of a class, its own first, then those that it inherits."""
    classes = [base for base in getattr(onnxgrail, name).__mro__ if base.__module__.startswith("onnxgrail.")]
    found: dict[str, ast.FunctionDef] = {}
    for part in (part for base in classes for part in defined(base).body):
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            found.setdefault(part.name, part)
    return list(found.values())


@cache
def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def section(name: str) -> str:
    """Return the section of one function or class."""
    node = definition(name)
    if isinstance(node, ast.FunctionDef):
        return f"## {name}\n\n{fenced(signature(node))}\n{described(node)}"
    if name == "Recipe":
        return f"## {name}\n\n{described(node)}\n{fields(node)}"
    lines = [f"- `{called(method)}`: {summary(method)}\n" for method in methods(name)]
    return f"## {name}\n\n{described(node)}" + ("\n" + "".join(lines) if lines else "")


def fenced(code: str) -> str:
    """Return code as a block that is marked as a signature, so that no test runs it."""
    return f"<!-- not run: a signature -->\n```python\n{code}\n```\n"


def signature(node: ast.FunctionDef) -> str:
    """Return `name(...)` with one parameter per line."""
    spec = node.args
    plain = [*spec.posonlyargs, *spec.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(spec.defaults))
    lines = [shown(a, d) for a, d in zip(plain, [*missing, *spec.defaults], strict=True)]
    if spec.kwonlyargs:
        lines.append("*" if spec.vararg is None else f"*{shown(spec.vararg, None)}")
        lines += [shown(a, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    elif spec.vararg is not None:
        lines.append(f"*{shown(spec.vararg, None)}")
    if spec.kwarg is not None:
        lines.append(f"**{shown(spec.kwarg, None)}")
    inside = "".join(f"    {line},\n" for line in lines)
    return f"{node.name}(\n{inside})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def shown(argument: ast.arg, default: ast.expr | None) -> str:
    """Return one parameter as it is written."""
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    return argument.arg + kind + (f" = {ast.unparse(default)}" if default is not None else "")


def called(method: ast.FunctionDef) -> str:
    """Return the call of a method, or the name of a property."""
    if any(ast.unparse(decorator) == "property" for decorator in method.decorator_list):
        return method.name
    names = [argument.arg for argument in method.args.args if argument.arg != "self"]
    return f"{method.name}({', '.join(names)})"


def summary(node: Definition) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def described(node: Definition) -> str:
    """Return a docstring as Markdown: paragraphs, and lists for its sections."""
    text = ast.get_docstring(node) or ""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    lines = [parts[0].strip() + "\n"]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        entries = "".join(f"- `{name}`: {words}\n" for name, words in entries_of(body))
        lines.append(f"\n*{title}*\n\n{entries}")
    return "".join(lines)


def entries_of(body: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a section with their descriptions."""
    for entry in re.split(r"\n(?=\S)", inspect.cleandoc("\n" + body)):
        name, _, words = " ".join(entry.split()).partition(": ")
        yield name.replace("**", ""), words


def fields(node: ast.ClassDef) -> str:
    """Return a dataclass as a table of fields, types and defaults as they are written."""
    rows = [
        f"| `{ast.unparse(part.target)}` | `{kind_of(part)}` | {default_of(part)} |\n"
        for part in node.body
        if isinstance(part, ast.AnnAssign)
    ]
    return "| field | type | default |\n| --- | --- | --- |\n" + "".join(rows)


def kind_of(part: ast.AnnAssign) -> str:
    """Return the type of a field without bars, which would end the table cell."""
    return ast.unparse(part.annotation).replace(" | ", " or ")


def default_of(part: ast.AnnAssign) -> str:
    """Return the default of a field, with names of constants resolved."""
    if part.value is None:
        return ""
    if isinstance(part.value, ast.Name):
        return f"`{getattr(onnxgrail.options, part.value.id)!r}`"
    text = ast.unparse(part.value)
    return "`{}`" if text.startswith("field(") else f"`{text}`"


def error(name: str) -> str:
    """Return one line of the list of errors."""
    node = definition(name)
    assert isinstance(node, ast.ClassDef)
    bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
    return f"- `{name}` ({bases}): {summary(node)}\n"


if __name__ == "__main__":
    (DOCS / "api.md").write_text(page(), encoding="utf-8")

"""HTML elements whose text is escaped by construction: only `Markup` is inserted unchanged."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset(
    {"br", "circle", "col", "ellipse", "hr", "input", "line", "meta", "path", "polyline", "rect", "stop", "use"}
)
ALLOWED = "\n\t\u00a0\u202f"
Child = str | int | None
Attribute = str | float | bool | None


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def escape(text: object) -> str:
    """Escape text for an element or a quoted attribute; characters that HTML cannot hold are replaced."""
    whole = str(text)
    if not whole.isprintable():
        whole = "".join(c if c.isprintable() or c in ALLOWED else "\ufffd" for c in whole)
    return html.escape(whole)


def el(tag: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element.

    Args:
        tag: name of the element.
        children: plain text, which is escaped, or `Markup`; None is left out.
        attributes: an underscore stands for a hyphen, and an underscore at the end is dropped (`class_`, `aria_label`);
            None and False leave the attribute out, True gives it no value.
    """
    parts = [f"<{tag}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.removesuffix("_").replace("_", "-")
        parts.append(f" {label}" if value is True else f' {label}="{escape(_number(value))}"')
    if tag in VOID and not children:
        return Markup("".join(parts) + ("/>" if tag not in {"br", "col", "hr", "meta"} else ">"))
    return Markup("".join(parts) + ">" + join(children) + f"</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """Return the children in sequence, text escaped."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c) for c in children if c is not None))


def name(text: str) -> Markup:
    """Return a name that may break after its dots and slashes."""
    return Markup(re.sub(r"(?<=[./_])(?=[^./_])", "<wbr>", escape(text)))


def _number(value: Attribute) -> str:
    """Format an attribute; coordinates need two digits after the decimal point, not seventeen."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)

"""Parse recipe files of YAML and JSON, in which every key stands once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onnxgrail.errors import UsageError

LARGEST = 2**20  # maximum size in bytes; YAML is parsed at a megabyte per second


def parsed(path: Path, hint: str) -> Any:
    """Read a file of YAML or JSON, according to its suffix.

    Args:
        path: the file.
        hint: what to give instead, for messages.

    Raises:
        UsageError: it is not a regular file, cannot be read, or has a duplicate key.
    """
    if not path.is_file():  # a pipe or a device may never end
        raise UsageError(f"{path} is not a regular file", hint=hint)
    json_file = path.suffix.lower() == ".json"
    if not json_file and path.stat().st_size > LARGEST:
        raise UsageError(f"{path} cannot be read as a recipe: it is larger than {LARGEST:,} bytes", hint=hint)
    try:
        text = path.read_text(encoding="utf-8")
        if json_file:
            return json.loads(text, object_pairs_hook=_once)
        import yaml

        try:
            _keys_once(yaml.compose(text, yaml.SafeLoader))
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
    except (ValueError, RecursionError) as error:  # also bytes that are not text
        raise UsageError(f"{path} cannot be read as a recipe: {error}") from error


def _keys_once(root: Any) -> None:
    """Refuse YAML with duplicate keys, the last of which would be used silently, and with merged keys.

    Nested merges can grow without limit, and recipes do not need merges.
    """
    seen: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        pairs = [pair for pair in node.value if isinstance(pair, tuple)]
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in pairs):
            raise ValueError("the key '<<' is not taken: write out what it would merge")
        _once((key.value, None) for key, _ in pairs if isinstance(key.value, str))
        todo += [value for _, value in pairs] or node.value


def _once(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return the mapping of keys to values; raise ValueError for a duplicate key."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {str(key)!r} stands twice")
        found[key] = value
    return found

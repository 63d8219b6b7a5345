"""Values that an option, a key of a recipe or a field of a report does not expect."""

from __future__ import annotations

import copy
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from tests.mutation.protos import MARK, pick

Rng = np.random.Generator

NUMBERS = (0, 1, -1, 2, 7, 0.3, -0.5, 0.999999, 1e-300, 1e308, 10**12, 10**30, 10**400, -(10**30), 2**31, 2**63, 2**64,
           float("nan"), float("inf"), float("-inf"))  # fmt: skip
WORDS = ("", " ", ",", "0.3", "much", "nan", "inf", "-1", "1e-3", "1e999", "9" * 5000, "\uff11", "true", "null", "none",
         "all", "plain", "best", "grail", "grasp", "ic", "fold", "l2", "wanda", "mlp", "mlp,heads", "canary", "x", "y",
         "50%", "0%", "-5%", "%", "101%", "500M", "25MB", "8XB", "2G", "1.2.3G", "9e999G", "cpu", "cuda", "cuda:99",
         "CUDAExecutionProvider:x", "TensorrtExecutionProvider", "CPUExecutionProvider", "int8", "fp16", "tensorrt",
         "x:1,6", "x:8x6", "x:[8,6]", "x:", ":1", "x:99999999999,6", "x:0", "n" * 5000, "\u540d\u524d \u00e9\u202e",
         "a\nb\tc", "\x1b[2Jgone", MARK, "%s{0}", "[/red]", "--force", "-")  # fmt: skip
PATTERNS = ("(a+)+$", "(b|b)*c", "((((", "(" * 5000, "a{99999999}", "[", "*", "(?P<a>", "(?i:w)", ".*", "(?<=a+)b",
            "\\", "w0|b", "(?:x{1000}){1000}")  # fmt: skip
PLACES = ("d.npz", "./d.npz", "../outside.npz", "/etc/passwd", ".", "..", "~", "m.onnx", "absent.npz", "link.npz",
          "d.npz/", "a\0b", "C:\\d.npz", "file://d.npz", "good.json", "folder", "/dev/zero", "t.json")  # fmt: skip
CODE = ("evil.py:f", "./evil.py:f", "evil.py:f/", "../other/evil.py:f", "evil.py", "evil.py:g", "link:f", "linked.npz")
NESTED: tuple[Any, ...] = ([], {}, [[]], [None], [1, 2, 3], [0.5], ["mlp"], ["mlp", "mlp"], ["x", 3], {"x": [8, 6]},
          {"x": [10**12, 10**12]}, {"x": []}, {"x": [-1, 6]}, {"": [1]}, {"z": [1]}, {"x": 6}, {"x": None}, [[[[[]]]]],
          {"a": {"b": {"c": 1}}}, ["CPUExecutionProvider"], ["Foo"], [True], ["evil.py:f"])  # fmt: skip
OBJECTS: tuple[Any, ...] = (b"bytes", np.float32(0.3), np.int64(4), np.array([1, 2]), np.zeros((0, 3)), set(), {"mlp"},
           range(3), 1j, Decimal("0.3"), object(), int, Path("d.npz"), Path(), len, np.bool_(1), np.float64("nan"),
           frozenset({"conv"}), iter(()), bytearray(b"x"), slice(1), NotImplemented, ...)  # fmt: skip


def value(rng: Rng) -> Any:
    """Anything that JSON and YAML can hold."""
    pool = pick((NUMBERS, NUMBERS, WORDS, WORDS, PATTERNS, PLACES, CODE, NESTED, (None, True, False)), rng)
    return copy.deepcopy(pick(pool, rng))


def changed(data: Any, rng: Rng, parts: tuple[str, ...] = ()) -> Any:
    """A copy of nested data with one part gone, there under another name, or something else.

    Args:
        data: dicts and lists.
        rng: of the choice.
        parts: keys of the top level that are taken more often than others.
    """
    made = copy.deepcopy(data)
    place = made
    if parts and rng.random() < 0.7:
        key = pick([key for key in parts if isinstance(made.get(key), dict | list)], rng)
        place = made if key is None else made[key]
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = pick(keys, rng)
        if key is None:
            return made
        inner = place[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.6:
            place = inner
            continue
        break
    share = rng.random()
    if share < 0.2:
        del place[key]
    elif share < 0.3 and isinstance(place, dict):
        place[str(pick((*WORDS, "ratoi", "force", "output", "custom_ops"), rng))] = place.pop(key)
    elif share < 0.4 and isinstance(place, list):
        place *= 2
    else:
        place[key] = value(rng)
    return made

"""ONNX Runtime's blocked layout: nothing passes, and the refusal names the layout."""

from __future__ import annotations

from functools import partial

from tests.contract.rule_case import Case

Blocked = partial(
    Case, domain="com.microsoft.nchwc", frame="maps", units=(), refused="own blocked layout", by="ReorderInput"
)
IN, OUT = "b = com.microsoft.nchwc.ReorderInput(h)\n", "z = com.microsoft.nchwc.ReorderOutput<channels = 8>"


def _pool(name: str, attributes: str = "<kernel_shape = [2, 2]>") -> Case:
    return Blocked(op=name, body=f"{IN}c = com.microsoft.nchwc.{name}{attributes}(b)\n{OUT}(c)")


CASES = [
    Blocked(op="ReorderInput", body=f"{IN}{OUT}(b)"),
    Blocked(op="ReorderOutput", body=f"{IN}{OUT}(b)"),
    _pool("MaxPool"),
    _pool("AveragePool"),
    _pool("GlobalMaxPool", ""),
    _pool("GlobalAveragePool", ""),
    Blocked(
        op="Conv",
        body="c = Concat<axis=1>(h, h, h, h)\nb = com.microsoft.nchwc.ReorderInput(c)\n"
        "k = com.microsoft.nchwc.Conv<kernel_shape = [1, 1]>(b, v)\n"
        "z = com.microsoft.nchwc.ReorderOutput<channels = 32>(k)",
        weights={"v": (32, 32, 1, 1)},  # a multiple of all block sizes
        width=32,
    ),
    _pool("Upsample", "<scales = [1, 1, 2, 2]>"),
]

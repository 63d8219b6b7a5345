"""Reports as the page reads them, of any number of layers, without a model."""

from __future__ import annotations

import dataclasses
from typing import Any

from onnxgrail.core import Recipe
from tests.verdicts import checked, output, verdict

JOINED = "it is combined with another tensor of the same width that cannot be narrowed"
WIDTHS = {"heads": (12, 32, 8), "mlp": (1536, 1, 1072)}


def block(kind: str, layer: int, prefix: str = "bert.encoder.layer") -> dict[str, Any]:
    units, size, kept = WIDTHS[kind]
    place = 60 * layer + (0 if kind == "heads" else 30)
    member = {"initializer": f"w{place}", "axis": 0, "role": "consumer", "kept": list(range(kept)), "cluster": None}
    return {
        "name": f"{prefix}.{layer}.{kind}",
        "kind": kind,
        "units": units,
        "unit_size": size,
        "span": [place, place + 20],
        "kept": kept,
        "kept_units": list(range(kept)),
        "exact": True,
        "members": [member],
        "error": {"plain": 0.2 / (layer + 1), "compensated": 0.03 / (layer + 1), "validation": 0.05},
        "outcome": {"status": "ok", "reason": "", "clamped": 0},
    }


def refusal(node: str, position: int | None, reason: str = JOINED) -> dict[str, Any]:
    return {"value": f"val_{node}", "node": node, "op": "Add", "reason": reason, "position": position}


def curve(one: dict[str, Any]) -> dict[str, Any]:
    units = one["units"]
    points = [[0, 1.0], [units // 4, 0.4], [units // 2, 0.1], [3 * units // 4, 0.02], [units, 0.0]]
    return {"block": one["name"], "units": units, "points": points, "effect": 0.02}


def encoder(layers: int = 6, *, curves: bool = False, **changes: Any) -> dict[str, Any]:
    """A text encoder: attention and MLP per layer, a refusal after each."""
    blocks = [block(kind, layer) for layer in range(layers) for kind in ("heads", "mlp")]
    refusals = [refusal(f"node_add_{60 * n + at}", 60 * n + at) for n in range(layers) for at in (25, 55)]
    return {
        "schema": 1,
        "tool": {"name": "onnxgrail", "version": "0.1.0"},
        "recipe": dataclasses.asdict(Recipe(ratio=0.3)) | {"fit": list(Recipe().fit), "blocks": list(Recipe().blocks)},
        "environment": {"python": "3.11", "onnx": "1.20", "onnxruntime": "1.23", "numpy": "2", "providers": ["CPU"]},
        "model": {
            "input": "minilm.onnx",
            "output": "small.onnx",
            "sha256_before": "0" * 64,
            "sha256_after": "1" * 64,
            "params_before": 22_565_379,
            "params_after": 19_242_531,
            "macs_before": 1_434_451_968,
            "macs_after": 984_612_864,
            "bytes_before": 90_979_236,
            "bytes_after": 77_690_642,
            "asked_ratio": 0.3,
            "achieved_ratio": 0.312,
            "ratio_of": "units",
            "ratio_total": 400,
            "model_ratio": 0.147,
            "budget": None,
        },
        "calibration": {"source": "calib.npz", "samples": 128, "synthetic": False, "notes": []},
        "allocation": {"curves": [curve(one) for one in blocks] if curves else []},
        "blocks": blocks,
        "refits": [{"node": "n", "weight": "w", "alpha": 0.1, "blend": 1.0, "before": 0.05, "after": 0.04}],
        "norms": [],
        "refines": [],
        "refusals": refusals,
        "verification": checked(output("last_hidden_state", verdict()), on="calibration"),
        "interface": [],
        "timing": {"trace": 0.2, "calibrate": 24.4, "forward": 6.9},
        "peak_rss_bytes": 1_100_000_000,
        "notes": [],
        **changes,
    }


def inspection(layers: int = 6) -> dict[str, Any]:
    """The same encoder before anything is done to it."""
    report = encoder(layers)
    names = ("name", "kind", "units", "unit_size", "span")
    blocks = [{key: one[key] for key in names} | {"params": 1000, "macs": 500} for one in report["blocks"]]
    return {
        "schema": 1,
        "path": "folder/minilm.onnx",
        "params": 100_000,
        "macs": 50_000,
        "bytes": 400_000,
        "blocks": blocks,
        "refusals": report["refusals"],
        "shares": {"all": {"params": 0.4, "macs": 0.9}},
        "predicted": [{"ratio": 0.25, "params": 80_000, "macs": 40_000, "bytes": 320_000}],
    }

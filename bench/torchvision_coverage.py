"""Measure which models of torchvision, or of all families of timm, can be narrowed, full size.

    pip install 'onnxgrail[cpu]' torch onnxscript && pip install --no-deps torchvision
    python bench/torchvision_coverage.py --out bench/results/torchvision_coverage.json [--only resnet] [--ratio 0.3]
    pip install timm && python bench/torchvision_coverage.py --timm --out bench/results/timm_coverage.json

Of torchvision these are all for classification and segmentation, and detection backbones; of timm the smallest model of
each family (a module of `timm.models`), which takes minutes to find.  Each model is built with random weights, exported
by `torch.onnx.export` and compressed without compensation in its own process, one at a time, so that the peak memory is
that of the largest.  Rows that the output has are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import tempfile
import time
import warnings
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SEGMENTATION_SIZE = 256
BACKBONES = ("resnet50", "resnet101", "mobilenet_v3_large", "resnext101_32x8d")
LIMIT = 1800  # seconds per model
LARGEST = 100e6  # parameters of a model of timm


def names() -> list[str]:
    """Return all models of the bench: `name`, `segmentation.name`, `backbone.name`."""
    import torchvision.models as tv

    found = tv.list_models(module=tv)
    found += [f"segmentation.{n}" for n in tv.list_models(module=tv.segmentation)]
    return sorted(found) + [f"backbone.{n}" for n in BACKBONES] + ["backbone.ssd_vgg16"]


def smallest() -> list[str]:
    """Return the smallest model of each family of timm, as `timm.name`."""
    import timm
    import torch

    found = []
    with torch.device("meta"):
        for family in timm.list_modules():
            sizes = {}
            for name in timm.list_models(module=family):
                with contextlib.suppress(Exception):  # some need numbers when they are built
                    sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
            least = min(sizes, key=lambda name: sizes[name], default=None)
            if least is not None and sizes[least] <= LARGEST:
                found.append(f"timm.{least}")
    return found


def declare() -> None:
    """Declare operators of a torchvision built for another torch: export needs their names, but does not run them."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    declare.keep = library  # type: ignore[attr-defined]  # operators live as long as their library


def build(name: str) -> tuple[Any, int]:
    """Return a model in evaluation mode with random weights, and the side of its input image."""
    import torch
    import torchvision.models as tv

    torch.manual_seed(0)
    group, _, inner = name.rpartition(".")
    if group == "timm":
        import timm

        module = timm.create_model(inner).eval()
        return module, module.default_cfg["input_size"][-1]
    if name == "backbone.ssd_vgg16":
        return tv.detection.ssd300_vgg16(weights=None, weights_backbone=None).backbone.eval(), 300
    if group == "backbone":
        make = tv.detection.backbone_utils
        form = make.mobilenet_backbone if inner.startswith("mobilenet") else make.resnet_fpn_backbone
        extra = {"fpn": True} if inner.startswith("mobilenet") else {}
        return form(backbone_name=inner, weights=None, trainable_layers=0, **extra).eval(), SEGMENTATION_SIZE
    if group == "segmentation":
        return tv.get_model(inner, weights=None, weights_backbone=None).eval(), SEGMENTATION_SIZE
    options = {"init_weights": False} if inner in ("googlenet", "inception_v3") else {}
    return tv.get_model(inner, weights=None, **options).eval(), _side(inner)


def _side(name: str) -> int:
    """Return the image size of a model, from the transforms of its weights."""
    import torchvision.models as tv

    crops = [w.transforms.keywords.get("crop_size", 224) for w in tv.get_model_weights(name)]
    return int(min(crops, default=224))


def row(name: str, ratio: float) -> dict[str, Any]:
    """Export and compress one model."""
    import torch

    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"model": name}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        started = time.perf_counter()
        try:
            module, side = build(name)
            image = torch.rand(2, 3, side, side)
            shapes = ({0: torch.export.Dim("batch")},)
            with torch.no_grad():
                torch.onnx.export(module, (image,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        except Exception as error:  # noqa: BLE001  whatever the exporter says is the row's answer
            return found | {"verdict": "does not export", "note": _brief(error)}
        del module
        found |= {"side": side, "export_seconds": round(time.perf_counter() - started, 1)}
        return found | narrowed(path, ratio)


def narrowed(path: Path, ratio: float) -> dict[str, Any]:
    """Compress one exported file; return what was removed, what was left alone and the time of each stage."""
    import onnxgrail

    started = time.perf_counter()
    try:
        report = onnxgrail.compress(
            path, path.with_name("o.onnx"), unit_ratio=ratio, compensate="none", selector="l2", check=False, samples=2
        ).report
    except onnxgrail.OnnxGrailError as error:
        return {"verdict": "refused", "note": _brief(error), "seconds": round(time.perf_counter() - started, 1)}
    data = report.data
    model, timing = data["model"], data["timing"]
    blocks = [b for b in data["blocks"] if b["kept"] < b["units"]]
    return {
        "verdict": "narrowed",
        "blocks": len(blocks),
        "params": model["params_before"],
        "params_removed": round(1 - model["params_after"] / model["params_before"], 4),
        "macs_removed": round(1 - model["macs_after"] / model["macs_before"], 4),
        "refusals": dict(Counter(r["reason"] for r in data["refusals"])),
        "seconds": round(time.perf_counter() - started, 1),
        "stages": timing,
    }


def _brief(error: BaseException) -> str:
    plain = re.sub(r"\x1b\[\d*m", "", f"{type(error).__name__}: {error}")  # some exporters print in color
    return re.sub(r"\s+", " ", plain)[:160]


def _work(name: str, ratio: float, queue: Any) -> None:
    declare()
    queue.put(row(name, ratio))


def alone(name: str, ratio: float) -> dict[str, Any]:
    """Compute one row in a separate process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=_work, args=(name, ratio, queue))
    worker.start()
    started = time.perf_counter()
    while worker.is_alive() and queue.empty() and time.perf_counter() - started < LIMIT:
        time.sleep(1)
    if queue.empty():
        note = f"no answer within {LIMIT} s" if worker.is_alive() else f"the process died (exit code {worker.exitcode})"
        worker.kill()
        return {"model": name, "verdict": "failed", "note": note}
    found: dict[str, Any] = queue.get()
    worker.join()
    return found


def page(data: dict[str, Any]) -> str:
    """Return the rows as a Markdown page."""
    tally = ", ".join(f"{n} {v}" for v, n in Counter(r["verdict"] for r in data["rows"]).most_common())
    library, which = "torchvision", "models of torchvision"
    if data["rows"][0]["model"].startswith("timm."):
        library, which = "timm", f"families of timm (their smallest models, up to {LARGEST / 1e6:.0f} M parameters)"
    lines = [
        f"# {library}",
        "",
        f"This page shows which {which} can be pruned, and how much of each.",
        f"`bench/torchvision_coverage.py` wrote it on {data['date']}: full size, random weights, exported by",
        f"`torch.onnx.export`, narrowed at unit ratio {data['ratio']:g} without compensation, all kinds of blocks.",
        f"{tally}.",
        "Seconds are those of the whole command on a busy machine, including the runs for trace and proof.",
        "",
        "| model | parameters | removed | MACs removed | blocks | seconds | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(data["rows"], key=lambda r: r["model"]):
        if r["verdict"] == "narrowed":
            size = f"{r['params'] / 1e6:.1f} M | {r['params_removed']:.0%} | {r['macs_removed']:.0%} | {r['blocks']}"
            lines.append(f"| {r['model']} | {size} | {r['seconds']:.0f} | narrowed |")
        else:
            lines.append(f"| {r['model']} | | | | | | {r['verdict']}: {r['note'].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the missing rows, and write each to the output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timm", action="store_true", help="timm, not torchvision")
    parser.add_argument("--only", default="")
    parser.add_argument("--page", type=Path, help="write the rows as Markdown too")
    parser.add_argument("--ratio", type=float, default=0.3)
    args = parser.parse_args()
    declare()
    rows = json.loads(args.out.read_text(encoding="utf-8"))["rows"] if args.out.exists() else []
    done = {r["model"] for r in rows}
    wanted = smallest() if args.timm else names()
    for name in (n for n in wanted if args.only in n and n not in done):
        found = alone(name, args.ratio)
        rows.append(found)
        print(json.dumps({k: v for k, v in found.items() if k not in ("stages", "refusals")}), flush=True)
        data = {"date": datetime.now(UTC).date().isoformat(), "ratio": args.ratio, "rows": rows}
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(dict(Counter(r["verdict"] for r in rows)))
    if args.page:
        args.page.write_text(page(json.loads(args.out.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()

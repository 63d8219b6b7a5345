"""Compare what can be narrowed in the embedded transformers, at equal parameters: `python -m bench.rotated`.

Prints JSON: the held-out score of each choice of blocks with the default method, and of all of them with equal shares.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime as ort

import onnxgrail
from onnxgrail.models import Embedded, load, score

MODELS = ("char_llama", "digits_vit")
SIZES = ("70%", "50%")
WAYS: dict[str, dict[str, Any]] = {
    "neurons and heads": {"blocks": ("mlp", "heads")},
    "stream": {"blocks": ("stream",)},
    "stream and neurons": {"blocks": ("mlp", "stream")},
    "stream, neurons and whole heads": {"blocks": ("mlp", "heads", "stream")},
    "all": {},
    "all, `--allocate uniform`": {"allocate": "uniform"},
}


def main() -> None:
    """Measure all rows and print them."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="rotated-") as folder:
        file = Path(folder) / "out.onnx"
        for model in map(load, MODELS):
            rows.append({"model": model.name, "way": "dense", "score": scored(model, model.model)})
            for size in SIZES:
                for way, choices in WAYS.items():
                    made = onnxgrail.compress(
                        model.model, file, data=model.calibration, target_params=size, force=True, **choices
                    )
                    params = made.report.data["model"]["params_after"]
                    rows.append(
                        {
                            "model": model.name,
                            "size": size,
                            "way": way,
                            "params": params,
                            "score": scored(model, file),
                        }
                    )
    print(json.dumps({"version": onnxgrail.__version__, "rows": rows}, indent=1))


def scored(model: Embedded, file: Path) -> float:
    """Return accuracy in percent or perplexity on held-out data."""
    session = ort.InferenceSession(file)
    return round(score(model, lambda feed: session.run(None, feed)), 3)


if __name__ == "__main__":
    main()

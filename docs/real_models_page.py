"""Write `docs/real-models.md` from `bench/results/max_loss.json`: `python docs/real_models_page.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results" / "max_loss.json"
LIMITS = (0.01, 0.05)
PURPOSE = {
    "char_llama": "next character, 0.8 M parameters",
    "digits_resnet": "digits, convolutions",
    "digits_vit": "digits, transformer",
    "ultraface_rfb320": "face boxes",
    "yunet_n320": "face boxes",
    "yolox_nano": "80 kinds of objects",
    "selfie_seg": "mask of a person",
    "palm": "hands",
    "face_landmark": "468 points of a face",
    "ppocr_cls": "is a text upside down?",
    "magika3": "type of a file",
    "nnsplit_en": "ends of sentences (LSTM)",
    "silero_vad": "speech or not (LSTM, `If`)",
    "silero_vad_ifless": "the same without `If`",
    "gtcrn_simple": "less noise in speech (GRU)",
}
MEASURES = {"px of 192 (0 best)": "px of 192, 0 is best", "SNR dB": "dB"}
HEAD = """# Models of others

This page shows what `--max-loss 1%`, the default, and `--max-loss 5%` remove from trained models, and how well the
results agree with the originals. It is written by `docs/real_models_page.py` from `bench/results/max_loss.json`, and
measured by `python -m bench.max_loss FOLDER`.

The first three models are embedded in onnxgrail. The others are small networks as their makers published them; nobody
here trained or exported them. Each was compressed with 40 to 512 samples of its own data and no other option.
**Agreement** is counted on inputs that were used for nothing else: the share of the original's answers that stay the
same by what the model is for, in pixels for points, as signal-to-noise ratio for speech. It has the uncertainty of a
few dozen to a few hundred inputs. **MACs** and **bytes** are what was removed.

A dash means that nothing was written (exit code 4), because no step is within the limit with 95 % confidence, or none
saves time. Detectors with 48 samples are such cases: the mean loss is within the limit, the bound is not.

| model | for | agreement | MACs, 1 % | bytes, 1 % | agreement, 1 % | MACs, 5 % | bytes, 5 % | agreement, 5 % |
|---|---|---|---:|---:|---:|---:|---:|---:|
"""


def page() -> str:
    """Return the whole page."""
    data = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows: dict[str, dict[float, Mapping[str, Any]]] = {}
    for row in data["rows"]:
        rows.setdefault(row["model"], {})[row["max_loss"]] = row
    means = [
        f"{-data['means'][f'{limit:g}'][key]:.1%}".replace("%", " %") for limit in LIMITS for key in ("macs", "bytes")
    ]
    last = f"| **mean**, dashes count as 0 | | | {means[0]} | {means[1]} | | {means[2]} | {means[3]} | |"
    return HEAD + "\n".join([*(_line(name, found) for name, found in rows.items()), last]) + "\n"


def _line(name: str, found: Mapping[float, Mapping[str, Any]]) -> str:
    measures = [row["measure"] for row in found.values() if "measure" in row]
    measure = MEASURES.get(measures[0], measures[0]) if measures else ""
    cells = [cell for limit in LIMITS for cell in _cells(found[limit])]
    return f"| {name} | {PURPOSE[name]} | {measure} | " + " | ".join(cells) + " |"


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield MACs, bytes and agreement; dashes if nothing was written."""
    if "refused" in row:
        yield from ("–", "–", "–")
        return
    yield from (f"{-row[key]:.1%}".replace("%", " %") for key in ("macs", "bytes"))
    agreement = row["agreement"]
    yield f"{agreement:.1f}" if row["measure"] == "SNR dB" else f"{agreement:.3f}"


if __name__ == "__main__":
    (DOCS / "real-models.md").write_text(page(), encoding="utf-8")

"""Write `docs/real-models.md` and the first table of the README from `bench/results/real.json`.

python -m bench.real FOLDER
python docs/real_models_page.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
RESULTS = DOCS.parent / "bench" / "results" / "real.json"
BEGIN, END = "<!-- real:begin -->\n", "<!-- real:end -->\n"
SHOWN = ("yolox_nano", "nnsplit_en", "silero_vad", "digits_vit")  # in the README: three of others, one of ours
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
EMBEDDED = ("char_llama", "digits_resnet", "digits_vit")
MEASURES = {"px of 192 (0 best)": "px of 192, 0 is best", "SNR dB": "dB"}
WAYS = {
    "none": "`--ratio 0.1 --compensate none`",
    "grail": "`--ratio 0.1 --compensate grail`",
    "best": "`--ratio 0.1`",
    "loss 1 %": "`--max-loss 1%`, the default",
    "loss 5 %": "`--max-loss 5%`",
    "loss 1 %, bytes": "`--max-loss 1% --minimize size`",
    "int8": "`--ratio 0 --quantize int8`",
    "ORT int8": "ORT int8",
    "onnxsim": "onnxsim 0.8.1",
    "onnxsim, pruned": "onnxsim 0.8.1, pruned 10 %",
}
FIRST = ("loss 1 %", "loss 5 %", "int8", "ORT int8", "onnxsim, pruned")  # ways of the tables over all models
NEEDLESS = 200  # dB from which only rounding is left


def page() -> str:
    """Return the whole page."""
    data = json.loads(RESULTS.read_text(encoding="utf-8"))["models"]
    names = [name for name in PURPOSE if name in data]
    one = data[names[0]]
    dates = sorted({found["date"] for found in data.values()})
    head = (
        (DOCS / "templates" / "real-models.md")
        .read_text(encoding="utf-8")
        .format(
            rounds=one["rounds"],
            machine=one["machine"],
            runtime=one["environment"]["onnxruntime"],
            date=dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}",
            later=later(data.values()),
        )
    )
    parts = ["\n".join([*table(data, names, FIRST), "", *means(data)]), "## One by one"]
    parts += ["\n".join(single(name, data[name])) for name in names]
    return f"{head}\n" + "\n\n".join(parts) + "\n"


def later(data: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows that were measured at another time, in words."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in (row for one in data for row in one["rows"] if "date" in row):
        found.setdefault((row["machine"], row["date"]), {})[WAYS[row["way"]]] = None
    return "".join(
        f"\n  Rows of {', and of '.join(ways)}: {machine}, {date}." for (machine, date), ways in found.items()
    )


def table(data: Mapping[str, Any], names: Sequence[str], ways: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table with a row per model and a column per way."""
    yield "| model | measure | " + " | ".join(WAYS[way] for way in ways) + " |"
    yield "|---|---|" + "---|" * len(ways)
    for name in names:
        rows = {row["way"]: row for row in data[name]["rows"]}
        purpose = f"{PURPOSE[name]}; {data[name]['samples']['held']} inputs"
        yield f"| `{name}`<br>{purpose} | {measure(rows)} | {' | '.join(cell(rows[way]) for way in ways)} |"


def measure(rows: Mapping[str, Any]) -> str:
    """Return the name of the measure of a model."""
    found = next(row["measure"] for row in rows.values() if "measure" in row)
    return MEASURES.get(found, found)


def cell(row: Mapping[str, Any]) -> str:
    """Return agreement, bytes and speed of a row, or that there is no file."""
    if "failed" in row:
        return "–" if row["refused"] else "fails"
    return f"{agreement(row)}<br>{share(row['bytes'])}, {speed(row)}"


def agreement(row: Mapping[str, Any]) -> str:
    """Format the agreement with its interval."""
    if row["measure"] == "SNR dB":
        return "rounding only" if row["agreement"] > NEEDLESS / 2 else f"{row['agreement']:.1f} ± {row['error']:.1f}"
    return f"{row['agreement']:.3f} ± {row['error']:.3f}"


def share(left: float | None) -> str:
    """Format what was removed, from the share that is left."""
    if left is None:
        return ""
    return "0 %" if abs(left - 1) < 5e-4 else f"{100 * (left - 1):+.1f} %".replace("-", "−")


def speed(row: Mapping[str, Any]) -> str:
    """Format the ratio of latencies."""
    low, high = row["interval"]
    return "=" if low <= 1 <= high else f"{row['ratio']:.2f}×"


def means(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the mean of what was removed, over all models and over those of others."""
    groups = list(data), [name for name in data if name not in EMBEDDED]
    yield (
        f"Means over the {len(groups[0])} models, and over the {len(groups[1])} of others; a model without a file "
        "counts as one of which nothing is removed:"
    )
    yield ""
    yield "| way | bytes | MACs | files | bytes, of others | MACs, of others | files, of others |"
    yield "|---|" + "---:|" * 6
    for way in (*FIRST, "loss 1 %, bytes"):
        cells = []
        for group in groups:
            rows = [next(row for row in data[name]["rows"] if row["way"] == way) for name in group]
            cells += [share(sum((row.get(key) or 1.0) for row in rows) / len(rows)) for key in ("bytes", "macs")]
            cells.append(str(sum("failed" not in row for row in rows)))
        yield f"| {WAYS[way]} | {' | '.join(cells)} |"


def single(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the heading and the table of one model."""
    rows = found["rows"]
    counts = found["samples"]
    yield f"### {name}\n"
    yield (
        f"{PURPOSE[name]}; {found['bytes'] / 1e6:.2f} MB, {found['median_ms']:.2f} ms; {counts['calib']} samples "
        f"for the fits, {counts['held']} to judge.\n"
    )
    yield f"| way | {measure({row['way']: row for row in rows})} | bytes | MACs | speed |"
    yield "|---|---:|---:|---:|---:|"
    notes = []
    for row in rows:
        words = WAYS[row["way"]]
        if "failed" in row:
            notes.append(f"{words}: {row['failed']}")
            yield f"| {words} | {'–' if row['refused'] else 'fails'} | | | |"
            continue
        notes += [f"{words}: {row['note']}"] if row["note"] else []
        low, high = row["interval"]
        yield (
            f"| {words} | {agreement(row)} | {share(row['bytes'])} | {share(row['macs'])} | "
            f"{row['ratio']:.2f}× ({low:.2f}–{high:.2f}) |"
        )
    if notes:
        yield ""
        yield from (f"- {note}" for note in notes)


def filled(readme: str) -> str:
    """Return the README with its first table."""
    data = json.loads(RESULTS.read_text(encoding="utf-8"))["models"]
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    names = [name for name in SHOWN if name in data]
    one = data[names[0]]
    told = (
        f"Agreement with the original on held-out inputs (± 95 %), bytes removed, and speed on one thread ("
        f"{one['machine']};\n"
        '"=": within noise; equal files differ by up to a fifth). Default settings. '
        f"[All {len(data)} models](docs/real-models.md), {one['date']}.\n"
    )
    return before + BEGIN + "\n".join(table(data, names, FIRST)) + f"\n\n{told}" + END + after


if __name__ == "__main__":
    (DOCS / "real-models.md").write_text(page(), encoding="utf-8")
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")

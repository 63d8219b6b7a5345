"""Loss, bytes and latency of weights in a few bits, beside the quantizers of ONNX Runtime.

    python -m bench.few_bits --minilm W/minilm.dynamo.onnx W/calib.npz W/heldout.npz > bench/results/few_bits.json
    python -m bench.few_bits --markdown

Subjects: the embedded models (perplexity and KL divergence per token on held-out text, right answers on held-out
images) and, if its files are given, MiniLM (1 - cosine of sentence embeddings); `bench/minilm_export.py W` and
`bench/minilm_text.py W` write them.  Quantizers that need a package that is missing are left out.  JSON on stdout, a
line per result on stderr; `--markdown` prints the tables of docs/deploy.md from the stored results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import io
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import Setup, open_session

Arrays = dict[str, Any]
Row = Mapping[str, Any]
Loss = Callable[[Path], dict[str, float]]
Write = Callable[[Path, Path], object]

RESULTS = Path(__file__).parent / "results" / "few_bits.json"
BATCH = 8
THREADS = 1, 2
BLOCK = 32
SLOW = 2**23  # bytes of a model for which Neural Compressor takes too long
OURS: Mapping[str, dict[str, Any]] = {
    "onnxgrail int8-weights": {"quantize": "int8-weights"},
    "onnxgrail int4": {"quantize": "int4"},
    "onnxgrail int4, nearest": {"quantize": "int4", "data": None, "samples": None, "held_out": None},
    "onnxgrail int4, symmetric": {"quantize": "int4", "symmetric": True},
    "onnxgrail int4, blocks of 128": {"quantize": "int4", "block_size": 128},
    "onnxgrail int4, accuracy level 4": {"quantize": "int4", "accuracy_level": 4},
}
WAYS = {
    "dense": "dense",
    "quantize_dynamic": "`quantize_dynamic`",
    "MatMulNBits rtn": "`MatMulNBitsQuantizer`, RTN",
    "MatMulNBits k-quant": "`MatMulNBitsQuantizer`, k-quant",
    "MatMulNBits hqq": "`MatMulNBitsQuantizer`, HQQ",
    "Neural Compressor GPTQ": "Neural Compressor, GPTQ",
    "onnxgrail int8-weights": "`--quantize int8-weights`",
    "onnxgrail int4": "`--quantize int4`",
    "onnxgrail int4, nearest": "`--quantize int4` without data, to nearest",
    "onnxgrail int4, symmetric": "`--quantize int4 --symmetric`",
    "onnxgrail int4, blocks of 128": "`--quantize int4 --block-size 128`",
    "onnxgrail int4, accuracy level 4": "`--quantize int4 --accuracy-level 4`",
}
LOSSES = {
    "perplexity_increase": ("perplexity increase", "{:.5f}"),
    "kl": ("KL divergence per token", "{:.5f}"),
    "one_minus_cosine": ("1 − cosine", "{:.5f}"),
    "right": ("right answers", "{}"),
    "other": ("other answers", "{}"),
}


def arrays(path: Path) -> Arrays:
    """Load a file of arrays."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def outputs(path: Path, data: Arrays) -> np.ndarray[Any, Any]:
    """Return the first output for all samples, in float64."""
    found = []
    with open_session(path, Setup(threads=1)) as session:
        count = len(next(iter(data.values())))
        for first in range(0, count, BATCH):
            feed = {name: array[first : first + BATCH] for name, array in data.items()}
            found.append(np.asarray(next(iter(session.run(feed).values())), np.float64))
    return np.concatenate(found)


def language(dense: Path, data: Arrays) -> Loss:
    """Return a function that measures perplexity and divergence from the dense model."""
    labels, feed = data["labels"], {name: array for name, array in data.items() if name != "labels"}
    real = labels >= 0

    def logs(path: Path) -> np.ndarray[Any, Any]:
        scores = outputs(path, feed)
        scores -= scores.max(axis=-1, keepdims=True)
        return np.asarray(scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True)))

    def perplexity(found: np.ndarray[Any, Any]) -> float:
        right = np.take_along_axis(found, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return float(np.exp(-right[real].mean()))

    wanted = logs(dense)

    def loss(path: Path) -> dict[str, float]:
        found = logs(path)
        apart = float((np.exp(wanted) * (wanted - found)).sum(axis=-1).mean())
        return {"perplexity_increase": perplexity(found) - perplexity(wanted), "kl": apart}

    return loss


def embeddings(path: Path, data: Arrays) -> np.ndarray[Any, Any]:
    """Return sentence embeddings: the mean over real tokens, of unit length."""
    weight = data["attention_mask"][..., None]
    mean = (outputs(path, data) * weight).sum(axis=1) / weight.sum(axis=1)
    return np.asarray(mean / np.linalg.norm(mean, axis=1, keepdims=True))


def sentences(dense: Path, data: Arrays) -> Loss:
    """Return a function that measures 1 - cosine of sentence embeddings."""
    wanted = embeddings(dense, data)
    return lambda path: {"one_minus_cosine": float(1 - (embeddings(path, data) * wanted).sum(axis=1).mean())}


def images(dense: Path, data: Arrays) -> Loss:
    """Return a function that counts images with the right answer, and those with another one than the dense model's."""
    labels, feed = data["labels"], {name: array for name, array in data.items() if name != "labels"}
    wanted = outputs(dense, feed).argmax(axis=-1)

    def loss(path: Path) -> dict[str, float]:
        found = outputs(path, feed).argmax(axis=-1)
        return {"right": int((found == labels).sum()), "other": int((found != wanted).sum())}

    return loss


def dynamic(source: Path, target: Path) -> None:
    """Quantize with `quantize_dynamic` of ONNX Runtime."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]
    quantize_dynamic(model, target, per_channel=True, weight_type=QuantType.QInt8)


def four_bits(name: str) -> Write:
    """Return a function that quantizes with `MatMulNBitsQuantizer` by an algorithm: `rtn`, `k-quant` or `hqq`."""

    def write(source: Path, target: Path) -> None:
        from onnxruntime.quantization import matmul_nbits_quantizer as tool

        algorithm = {
            "rtn": lambda: None,
            "k-quant": tool.KQuantWeightOnlyQuantConfig,
            "hqq": lambda: tool.HQQWeightOnlyQuantConfig(block_size=BLOCK, bits=4),
        }[name]()
        made = tool.MatMulNBitsQuantizer(
            onnx.load(source), block_size=BLOCK, is_symmetric=False, accuracy_level=0, algo_config=algorithm
        )
        made.process()
        made.model.save_model_to_file(str(target), False)

    return write


def gptq(calibration: Path, samples: int) -> Write:
    """Return a function that quantizes with GPTQ of Neural Compressor (the package onnx-neural-compressor)."""

    def write(source: Path, target: Path) -> None:
        from onnx_neural_compressor.data_reader import CalibrationDataReader
        from onnx_neural_compressor.quantization import algorithm_entry, config

        class Reader(CalibrationDataReader):  # type: ignore[misc]
            """One sample at a time."""

            def __init__(self) -> None:
                self.rewind()

            def rewind(self) -> None:
                data = {name: array for name, array in arrays(calibration).items() if name != "labels"}
                self._feeds = iter([{n: a[k : k + 1] for n, a in data.items()} for k in range(samples)])

            def get_next(self) -> Arrays | None:
                return next(self._feeds, None)

        form = config.GPTQConfig(weight_bits=4, weight_group_size=BLOCK, weight_sym=False)
        onnx.save(algorithm_entry.gptq_quantize_entry(str(source), form, Reader()), target)

    return write


def files(dense: Path, calibration: Path, samples: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of each way to quantize, the dense file first."""
    yield "dense", dense
    others: dict[str, Write] = {"quantize_dynamic": dynamic}
    others |= {f"MatMulNBits {name}": four_bits(name) for name in ("rtn", "k-quant", "hqq")}
    if dense.stat().st_size < SLOW and any(node.op_type == "MatMul" for node in onnx.load(dense).graph.node):
        others["Neural Compressor GPTQ"] = gptq(calibration, samples)
    for name, write in others.items():
        path = folder / f"{len(list(folder.iterdir()))}.onnx"
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                write(dense, path)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        yield name, path
    choices: dict[str, Any] = {"ratio": 0, "data": calibration, "held_out": 0, "check": False, "samples": samples}
    for name, form in OURS.items():
        path = folder / f"{len(list(folder.iterdir()))}.onnx"
        onnxgrail.compress(dense, path, **{**choices, **form})
        yield name, path


def measured(
    name: str, made: Mapping[str, Path], loss: Loss, data: Arrays, rounds: int
) -> tuple[list[dict[str, Any]], str]:
    """Return a row per file, and the machine."""
    times: dict[int, Any] = {}
    for threads in THREADS:
        feed = {key: array[:1] for key, array in data.items() if key != "labels"}
        times[threads] = onnxgrail.bench(*made.values(), data=feed, batch_sizes=(1,), rounds=rounds, threads=threads)
    rows = []
    for place, (way, path) in enumerate(made.items()):
        row: dict[str, Any] = {"model": name, "way": way, "bytes": path.stat().st_size, **loss(path)}
        for threads, found in times.items():
            one = found.rows[place].times
            row |= {f"median_ms_{threads}": one.median, f"times_as_fast_{threads}": one.ratio}
        rows.append(row)
        print("  ".join(f"{v:.5g}" if isinstance(v, float) else str(v) for v in row.values()), file=sys.stderr)
    return rows, str(times[1].machine)


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables of the page, one per model."""
    tables = []
    for name in dict.fromkeys(row["model"] for row in rows):
        some = [row for row in rows if row["model"] == name]
        losses = [key for key in LOSSES if key in some[0]]
        heads = [f"`{name}`", "bytes", *(LOSSES[key][0] for key in losses), "speed", "on 2 threads"]
        lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
        for row in some:
            dense = row["way"] == "dense"
            lost = ["" if dense and key != "right" else LOSSES[key][1].format(row[key]) for key in losses]
            speeds = ["" if dense else f"{row[f'times_as_fast_{threads}']:.2f}×" for threads in THREADS]
            cells = [WAYS[row["way"]], f"{row['bytes']:,}", *lost, *speeds]
            lines.append(f"| {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def main() -> None:
    """Measure all subjects and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", nargs=3, type=Path, metavar=("MODEL", "CALIB", "HELDOUT"))
    parser.add_argument("--samples", type=int, default=128, help="calibration samples")
    parser.add_argument("--judged", type=int, default=96, help="held-out samples of MiniLM")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--markdown", action="store_true", help="print the tables of the stored results")
    given = parser.parse_args()
    if given.markdown:
        print(markdown(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]))
        return
    logging.disable(logging.WARNING)
    subjects = []
    for name, judge in (("char_llama", language), ("digits_resnet", images), ("digits_vit", images)):
        one = models.load(name)
        subjects.append((name, Path(one.model), Path(one.calibration), arrays(Path(one.heldout)), judge))
    if given.minilm:
        model, calibration, heldout = given.minilm
        few = {name: array[: given.judged] for name, array in arrays(heldout).items()}
        subjects.append(("minilm", model, calibration, few, sentences))
    rows: list[dict[str, Any]] = []
    machine = ""
    for name, dense, calibration, data, loss in subjects:
        with tempfile.TemporaryDirectory() as folder:
            made = dict(files(dense, calibration, given.samples, Path(folder)))
            some, machine = measured(name, made, loss(dense, data), data, given.rounds)
            rows += some
    head = {"bench": "few_bits", "date": dt.datetime.now(dt.UTC).date().isoformat(), "machine": machine}
    print(json.dumps({**head, "samples": given.samples, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

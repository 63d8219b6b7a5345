"""Compute digests of the files that 30 commands write, to compare them before and after a refactoring.

    python bench/same_bytes.py keep digests.json [--zoo FOLDER]
    python bench/same_bytes.py compare digests.json [--zoo FOLDER]

The commands cover methods, reducers, selectors, compensations, budgets, `--resume`, two processes, half precision,
external weights, quantized models, caches, grasp and refine, on the embedded models; `--zoo` adds every `.onnx` file of
a folder, narrowed without data.  Each digest is over the model that a command writes, without its metadata, or over
its error.  `compare` prints the commands whose digests differ and exits with 1 if there are any.
Digests depend on the processor and on versions of numpy and ONNX Runtime: compare on one machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx

MODELS = Path(__file__).resolve().parents[1] / "models" / "data"
VIT, RESNET, LLAMA = "digits_vit", "digits_resnet", "char_llama"
SECONDS = 900
COMMON = "--no-check --quiet"
RATIO = ("--ratio", "0.3")  # of commands that give no amount of their own
AMOUNTS = ("--max-loss", "--unit-ratio", "--target-")
TORCH = importlib.util.find_spec("torch") is not None

# For each command the model and the options.
COMMANDS: dict[str, tuple[str, str]] = {
    "ratio": (VIT, ""),
    "max loss": (VIT, "--max-loss 5% --minimize params"),
    "grail closed": (RESNET, "--compensate grail --closed-loop"),
    "grail open": (RESNET, "--compensate grail --open-loop"),
    "none": (RESNET, "--compensate none"),
    "obs": (VIT, "--selector obs"),
    "slimgpt": (LLAMA, "--selector slimgpt --compensate grail --samples 32"),
    "flap": (LLAMA, "--selector flap --compensate none --samples 32"),
    "gram": (VIT, "--selector gram --compensate grail"),
    "l1": (RESNET, "--selector l1 --compensate grail"),
    "l2": (RESNET, "--selector l2"),
    "random": (VIT, "--selector random --seed 3 --compensate none"),
    "fold": (RESNET, "--reducer fold --compensate grail"),
    "fold-kmeans": (VIT, "--reducer fold-kmeans --compensate grail"),
    "fold-gram": (VIT, "--reducer fold-gram"),
    "unit ratio": (VIT, "--unit-ratio 0.5"),
    "target params": (VIT, "--target-params 60%"),
    "target macs": (RESNET, "--target-macs 60% --compensate grail"),
    "target size": (RESNET, "--target-size 70% --compensate none"),
    "global": (VIT, "--target-params 70% --samples 64"),
    "flap allocation": (VIT, "--allocate flap --target-params 70% --compensate none"),
    "norms": (RESNET, "--norms all --compensate grail"),
    "heads only": (VIT, "--blocks heads --round-to 1"),
    "stream": (RESNET, "--blocks stream,conv --unit-ratio 0.25"),
    "small cache": (LLAMA, "--cache-budget 4M --samples 32"),
    "resume": (VIT, "--resume kept --compensate grail"),
    "external": (VIT, "--save-as-external-data"),
    "fp16": (RESNET, "--quantize fp16"),
    "int8": (RESNET, "--quantize int8 --samples 32"),
    "int8 dynamic": (VIT, "--quantize int8-dynamic"),
    "int4": (VIT, "--quantize int4 --samples 64"),
    "fewest bytes": (RESNET, "--max-loss 5% --minimize size --samples 64"),
    "drawn": (VIT, "--samples 16 --data ''"),
    "kv-io": (LLAMA, "--kv-io --samples 16 --compensate grail"),
    "two processes": (VIT, "--compensate grail"),
    "grasp": (LLAMA, "--method grasp --grasp-rank magnitude --grasp-layers 1 --samples 16"),
    "refine": (VIT, "--refine laco --samples 64 --compensate grail"),
}
NEEDS_TORCH = frozenset({"two processes", "refine"})


def words_of(name: str) -> list[str]:
    """Return the arguments of a command, without the program."""
    model, options = COMMANDS[name]
    words = shlex.split(options)
    data = [] if "--data" in words else ["--data", str(MODELS / f"{model}.calib.npz")]
    words = [w for k, w in enumerate(words) if w != "--data" and (k == 0 or words[k - 1] != "--data")]
    amount = () if any(word.startswith(AMOUNTS) for word in words) else RATIO
    return ["compress", str(MODELS / f"{model}.onnx"), "out.onnx", *data, *words, *amount, *COMMON.split()]


def run(words: list[str], processes: int = 1) -> str:
    """Run a command in an empty folder; return the digest of its model, or its error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "onnxgrail", *words],
                cwd=folder,
                env=environment | placed,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for placed in places(processes)
        ]
        errors = [process.communicate(timeout=SECONDS)[1] for process in started]
        if any(process.returncode for process in started):
            return "error: " + errors[0].strip().splitlines()[-1]
        return digest(folder)


def places(count: int) -> Iterator[dict[str, str]]:
    """Yield the environment variables that number each process."""
    if count == 1:
        yield {}
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    yield from ({**common, "RANK": str(k), "LOCAL_RANK": str(k)} for k in range(count))


def digest(folder: Path) -> str:
    """Return the checksum of the model that a command wrote, with weights and without metadata."""
    model = onnx.load(folder / "out.onnx")
    del model.metadata_props[:]
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def zoo(folder: Path | None) -> dict[str, list[str]]:
    """Return a command without data for every model of a folder."""
    files = [] if folder is None else sorted(folder.glob("*.onnx"))
    if folder is not None and not files:
        sys.exit(f"no .onnx file in {folder}: packed models have to be unpacked first")
    options = ["--unit-ratio", "0.25", "--samples", "4", "--compensate", "grail", *COMMON.split()]
    return {f"zoo {f.stem}": ["compress", str(f.resolve()), "out.onnx", *options] for f in files}


def digests(folder: Path | None, workers: int) -> dict[str, str]:
    """Return the digests of all commands that this installation can run."""
    commands = {name: words_of(name) for name in COMMANDS if TORCH or name not in NEEDS_TORCH}
    commands |= zoo(folder)
    with ThreadPoolExecutor(workers) as pool:
        futures = {
            name: pool.submit(run, words, 2 if name == "two processes" else 1) for name, words in commands.items()
        }
        return {name: future.result() for name, future in futures.items()}


def main() -> None:
    """Store digests, or compare them with stored digests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("keep", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--zoo", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    found = digests(given.zoo, given.workers)
    ran = {"commands": len(found), "left out without torch": [] if TORCH else sorted(NEEDS_TORCH)}
    if given.verb == "keep":
        given.file.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps({**ran, "errors": [n for n, d in found.items() if d.startswith("error")]}))
        return
    known = json.loads(given.file.read_text())
    other = {name: [known.get(name), d] for name, d in found.items() if known.get(name) != d}
    print(json.dumps({**ran, "different": other}, indent=1))
    sys.exit(bool(other))


if __name__ == "__main__":
    main()

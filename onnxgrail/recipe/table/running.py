"""The options on data, files, the report and the machine."""

from __future__ import annotations

from onnxgrail.options import CONTENTS
from onnxgrail.recipe.table.option import ANY, COUNT, FLAG, NUMBERS, PATH, Option, Value, one_of
from onnxgrail.registry import MENU

GATED = ("compress", "refine", "compare")
DATA_COMMANDS = (*GATED, "frontier")
READING = (*DATA_COMMANDS, "bench")
RUNS = ("compress", "refine", "apply")
WRITES = (*RUNS, "frontier")
TALKING = (*WRITES, "compare", "bench", "export")

DATA = (
    Option(
        "data",
        ANY,
        f"Calibration data: {MENU}. A function is run.",
        also=("--calib",),
        otherwise="random inputs",
        commands=(*READING, "apply", "inspect"),
    ),
    Option(
        "held_out",
        ANY,
        "Samples that are excluded from all fits and judge the result, also for --min-cosine: N samples of the data, "
        "separate data, or 0 for none.",
        metavar="N|PATH",
        otherwise="a fifth of the data, 8 to 256 samples, if there are 32 or more",
        commands=WRITES,
    ),
    Option("samples", COUNT, "Number of samples to use, spread over the data.", commands=DATA_COMMANDS),
    Option("batch_size", COUNT, "Samples per run.", commands=DATA_COMMANDS),
    Option(
        "seed", Value(kind="whole", metavar="N", least=0), "Seed of all random numbers.", commands=(*READING, "export")
    ),
    Option(
        "input_shapes",
        Value(kind="shapes", metavar="NAME:SHAPE"),
        "Shape of a random input: x:1,3,224,224, x:1x3x224x224 or x:[1,3,224,224]; repeatable.",
        commands=(*READING, "inspect", "export"),
    ),
    Option(
        "reference",
        Value(kind="any", metavar="DENSE"),
        "The model that SMALL was made from, with the same inputs and outputs.",
        required=True,
        commands=("refine",),
    ),
    Option(
        "tokenizer",
        Value(kind="file", metavar="FILE"),
        "For text: the tokenizer.json of the model.",
        commands=(*READING, "apply", "inspect"),
    ),
    Option(
        "sequence_length",
        COUNT,
        "For text: maximum number of tokens per sample.",
        otherwise="128, if the model leaves it open",
        commands=READING,
    ),
    Option(
        "image_mean",
        NUMBERS,
        "For images: mean to subtract from pixels in 0..1, one for all channels or one per channel.",
        metavar="M[,M,M]",
        otherwise="0",
        commands=READING,
    ),
    Option("image_std", NUMBERS, "For images: divisor after that.", metavar="S[,S,S]", otherwise="1", commands=READING),
    Option(
        "image_form",
        Value(kind="words", words=("rgb", "bgr", "crop", "pad", "stretch")),
        "For images: bgr, the channel order of OpenCV; pad, scaled to fit with gray around (letterbox), or stretch, "
        "instead of cropped.",
        metavar="bgr,pad",
        otherwise="rgb,crop",
        commands=READING,
    ),
    Option(
        "contents",
        Value(kind="contents", metavar="NAME=CONTENT", words=CONTENTS),
        "What an output holds, if its values and its name do not tell: logits=classes, risks=scores, y=values, "
        "v=embedding; hidden=nothing does not judge. Repeatable; see docs/loss.md.",
        commands=DATA_COMMANDS,
    ),
    Option("save_stats", PATH, "Store the statistics of the original model in a file.", metavar="FILE.npz"),
    Option(
        "stats",
        PATH,
        "Use stored statistics: another ratio, selector or budget then needs no new pass over the original.",
        metavar="FILE.npz",
    ),
)

OUTPUT = (
    Option(
        "output", PATH, "File to write.", also=("-o",), otherwise="IN.compressed.onnx", commands=(*WRITES, "report")
    ),
    Option(
        "force",
        FLAG,
        "Replace existing files; input files are never replaced.",
        commands=(*WRITES, "inspect", "export", "demo", "report"),
    ),
    Option("dry_run", FLAG, "Do what a run does, which takes as long, and write no model.", commands=RUNS),
    Option(
        "save_as_external_data",
        FLAG,
        "Store weights in a separate file, or in the model file; over 2 GB always in a separate file.",
        off="--no-save-as-external-data",
        otherwise="as IN has them",
        commands=(*RUNS, "export"),
    ),
    Option(
        "keep_initializer_inputs",
        FLAG,
        "Keep weights that are also graph inputs as inputs; ONNX Runtime cannot fold or fuse such weights.",
        commands=("compress", "frontier"),
    ),
    Option("simplify", FLAG, "After narrowing, fold and fuse nodes with onnxslim (extra `simplify`)."),
    Option(
        "quantize",
        one_of("none", "int8", "int8-dynamic", "int8-weights", "int4", "fp16"),
        "As the last step, quantize: weights to 8 bits, and layers compute in 8 bits where this machine is faster then "
        "(int8), int8 with ranges found at run time (int8-dynamic), only weights of matrices and convolutions in 8 or "
        "4 bits (int8-weights, int4; with --minimize latency, in forms not slower here), or half precision (fp16).",
    ),
    Option(
        "block_size",
        Value(kind="whole", metavar="N", least=16, most=256),
        "For int4 and int8-weights: weights that share a scale, 16, 32, 64, 128 or 256.",
    ),
    Option(
        "symmetric",
        FLAG,
        "For int4 and int8-weights: store no zero points; the file is a little smaller, and less exact.",
    ),
    Option(
        "accuracy_level",
        Value(kind="whole", metavar="0|1|4", least=0, most=4),
        "For int4 and int8-weights: 0 and 1 compute in float32; 4 rounds activations to 8 bits, too. Measure which is "
        "faster.",
    ),
    Option(
        "qdq",
        FLAG,
        "For int4 and int8-weights: store weights with DequantizeLinear (opset 21; 13 for 8 bits), for runtimes "
        "without the operators of ONNX Runtime. For int8: compute in 8 bits also if this machine is faster in float.",
    ),
    Option(
        "pick",
        Value(kind="amount", metavar="K|L"),
        "Write the model of a point: its number, or the smallest one within a loss such as 1%.",
        commands=("frontier",),
    ),
    Option(
        "save_recipes",
        PATH,
        "Store a recipe for each point in a folder, for `onnxgrail apply`.",
        metavar="DIR",
        commands=("frontier",),
    ),
    Option("save_recipe", PATH, "Store all choices in a file (.yaml or .json) for `onnxgrail apply`.", metavar="FILE"),
)

REPORT = (
    Option(
        "check",
        FLAG,
        "Compare the result with the original.",
        off="--no-check",
        commands=("compress", "refine", "export"),
    ),
    Option(
        "min_cosine",
        Value(kind="number", metavar="C", least=-1, most=1),
        "Exit 3 if the mean cosine of an output is lower; the file is still written.",
        commands=GATED,
    ),
    Option(
        "max_nmse",
        Value(kind="number", metavar="E", least=0),
        "Exit 3 if the squared error of an output, relative to its energy, is higher.",
        commands=("compare",),
    ),
    Option("target", one_of("tensorrt"), "Report what this runtime would reject or run slowly."),
    Option("strict", FLAG, "Exit 3 if --target would reject the model; it is still written."),
    Option(
        "report",
        Value(kind="report", metavar="FILE"),
        "Write the report as JSON (.json) or as a page (.html); repeatable.",
        commands=(*WRITES, "inspect"),
    ),
    Option(
        "latency",
        FLAG,
        "Measure latency of the original and the result, in turn, for the report.",
        off="--no-latency",
        otherwise="if a page is written, or weights are quantized",
        commands=("compress", "apply", "compare"),
    ),
    Option(
        "curves",
        FLAG,
        "Measure the error of every block alone at several widths, for the report; takes as long as calibrating, or "
        "twice as long.",
        off="--no-curves",
        otherwise="if a page of a small model is written",
        commands=("compress", "apply"),
    ),
    Option(
        "as_json", FLAG, "Print JSON instead of a table.", spelling="--json", commands=(*TALKING, "inspect", "demo")
    ),
    Option("quiet", FLAG, "Print only errors (and JSON with --json).", also=("-q",), commands=TALKING),
)

MACHINE = (
    Option(
        "device",
        Value(kind="device", metavar="cpu|cuda[:N,...]"),
        "Device on which models run and sums are computed; several GPUs need as many processes (torchrun).",
        otherwise="cpu",
        commands=(*READING, "apply"),
    ),
    Option(
        "providers",
        Value(kind="names", metavar="NAME"),
        "Execution providers instead of --device; repeatable.",
        commands=(*READING, "apply"),
    ),
    Option(
        "custom_ops",
        Value(kind="paths", metavar="LIBRARY"),
        "Shared library with operators that ONNX Runtime does not have; its code is executed.  Repeatable.",
        commands=(*READING, "apply", "inspect"),
    ),
    Option(
        "cache_budget",
        Value(kind="amount", metavar="SIZE"),
        "Memory for activations kept between blocks; the rest goes to temporary files.",
        commands=("compress", "frontier"),
    ),
    Option(
        "resume",
        PATH,
        "Store finished steps in this folder; repeating the command of a killed run continues it.",
        metavar="DIR",
        commands=WRITES,
    ),
    Option("no_progress", FLAG, "Do not show progress.", commands=(*TALKING, "demo")),
    Option("verbose", FLAG, "Print more details, and tracebacks of errors.", commands=(*TALKING, "inspect", "demo")),
)

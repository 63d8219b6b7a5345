"""The options that decide what is removed, and how the loss is compensated."""

from __future__ import annotations

from onnxgrail.options import FITS, KINDS, MAX_LOSS
from onnxgrail.recipe.table.option import AMOUNT, COUNT, FLAG, PATTERN, SHARE, Option, Value, one_of, some_of
from onnxgrail.registry import COMPENSATORS, REDUCERS, REFINEMENTS, SELECTORS

NARROWING = ("compress", "frontier")

REMOVE = (
    Option(
        "max_loss",
        Value(kind="portion", metavar="L", above=0, below=1),
        "Largest loss on samples that no fit has seen: 1%, 0.005. The widths that cost least within it are searched; "
        "its upper bound has to hold, see docs/loss.md.",
        otherwise=f"{MAX_LOSS:.0%}, unless another amount is given",
        commands=("compress", "compare"),
    ),
    Option(
        "minimize",
        one_of("latency", "macs", "params", "size"),
        "What --max-loss makes as small as it can.",
        commands=NARROWING,
    ),
    Option(
        "metric",
        Value(kind="any", metavar="FILE.py:FUNCTION"),
        "Loss of --max-loss, instead of that of the outputs' kinds: function(reference, candidate, labels), which is "
        "run; see docs/metric.md.",
        commands=(*NARROWING, "apply"),
    ),
    Option(
        "points",
        Value(kind="whole", metavar="N", least=1, most=64),
        "Number of points; the cost falls by a like share from each to the next.",
        otherwise="10",
        commands=("frontier",),
    ),
    Option(
        "most_loss",
        Value(kind="portion", metavar="L", above=0, below=1),
        "Loss (its upper bound) at which the points end.",
        otherwise="30%",
        commands=("frontier",),
    ),
    Option("ratio", SHARE, "Share to remove of the parameters in blocks that can be narrowed.", also=("--sparsity",)),
    Option(
        "unit_ratio",
        SHARE,
        "Instead of --ratio: share to remove of the channels, neurons and heads of every block, as papers count.",
    ),
    Option("target_params", AMOUNT, "Instead of a ratio: maximum number of parameters: 60%, 500M."),
    Option("target_macs", AMOUNT, "Maximum number of multiply-accumulates per sample: 60%, 1.2G."),
    Option("target_size", AMOUNT, "Maximum size of the written file, quantized if so asked: 60%, 25MB."),
    Option("target_latency", AMOUNT, "Maximum time of one run, measured on this machine: 60%, 8ms.", metavar="T"),
    Option(
        "widths",
        Value(kind="widths"),
        "Units that stay, by name of the block as `onnxgrail inspect` lists them; blocks without a width stay whole.",
        commands=(),
    ),
    Option(
        "bits",
        Value(kind="widths"),
        "Bits of weights, by their names, beside given widths: 4, 8 or 16. Other weights keep theirs.",
        commands=(),
    ),
    Option(
        "only_bits",
        FLAG,
        "For --target-size, or with --minimize size: only give weights fewer bits, remove nothing.",
        commands=NARROWING,
    ),
    Option(
        "only_widths",
        FLAG,
        "For --target-size, or with --minimize size: all weights keep their bits. By default they get "
        "16, 8 or 4 bits where that costs less loss per byte than narrowing.",
        commands=NARROWING,
    ),
    Option(
        "effort",
        one_of("fast", "normal", "max"),
        "How much time the result may take. fast: --compensate grail; max: --selector obs --allocate global, and "
        "--refine laco,distill if torch is installed; each of them only where that option is not given. --max-loss "
        "tries fewer candidates with fast, more with max.",
        commands=NARROWING,
    ),
    Option(
        "allocate",
        one_of("auto", "uniform", "depth", "flap", "global"),
        "Distribution of an amount over blocks: equal, more with depth, by standardized scores, or by measured loss of "
        "the outputs. auto: global if there are data that fits follow and at most 512 MiB of weights, else uniform; "
        "with --unit-ratio uniform.",
    ),
    Option(
        "round_to", COUNT, "Keep multiples of this number if the width allows it; 1 turns it off.", commands=NARROWING
    ),
    Option(
        "blocks",
        some_of(KINDS, "KINDS"),
        "Kinds of blocks to narrow: conv, mlp, heads (where those inside cannot go), qk and vo (channels inside heads, "
        "of queries and keys and of values), stream (the channels that residual connections share), embedding (the "
        "channels of a table, with a matrix after the lookup; for sizes in parameters or bytes), rank (the channels "
        "between a convolution and one of a single tap, which become two where that costs less).",
        commands=NARROWING,
    ),
    Option("include", PATTERN, "Narrow only blocks whose name or nodes match.", commands=NARROWING),
    Option("exclude", PATTERN, "Do not narrow blocks whose name or nodes match.", commands=NARROWING),
    Option(
        "kv_io",
        FLAG,
        "Also narrow key-value caches and states (of recurrent layers, of streamed convolutions) that are inputs and "
        "outputs of the model; callers must then pass narrower ones.",
        commands=(*NARROWING, "inspect"),
    ),
    Option(
        "keep_tokens",
        Value(kind="file", metavar="FILE"),
        "Keep only some rows of embedding tables: those of the ids in FILE, a JSON list or one per line. Inputs and "
        "outputs stay as they are: other ids are looked up as the first one, and a tied head gives them its lowest "
        "value.",
        otherwise="all rows stay",
        commands=("compress", "apply"),
    ),
    Option(
        "selector",
        one_of(*SELECTORS, plugins="onnxgrail.selectors"),
        "Criterion that ranks channels, neurons and heads; auto takes the exact elimination (obs) for every block "
        "where it costs less than the fits, and wanda for the others.",
        commands=(*NARROWING, "apply"),
    ),
    Option(
        "reducer",
        one_of(*REDUCERS, plugins="onnxgrail.reducers"),
        "Remove channels, neurons and heads (prune), or merge them (fold).",
        commands=(*NARROWING, "apply"),
    ),
    Option(
        "method",
        some_of(("grail", "grasp", "ic"), "METHODS"),
        "Narrow blocks (grail), replace redundant layers by low rank (grasp), or both: grail,grasp; ic adds input "
        "compensation to either.",
    ),
    Option(
        "grasp_layers",
        Value(kind="layers", metavar="LAYERS"),
        "Number of layers that grasp replaces, the most redundant first; or a comma-separated list of names of "
        "layers, blocks, nodes or weights; or all, filtered by --include.",
        otherwise="as many as --ratio requires; with grail,grasp a number is needed",
    ),
    Option(
        "grasp_retain",
        Value(kind="number", metavar="R", above=0, below=1),
        "Share of the parameters of a replaced matrix to keep.",
    ),
    Option(
        "grasp_rank",
        one_of("attribution", "taylor", "magnitude"),
        "Criterion for the singular values to keep: effect on the loss with the gradient at half their value "
        "(attribution) or at the full weights, as published (taylor), both with torch; or size (magnitude).",
    ),
    Option(
        "grasp_whiten",
        FLAG,
        "Decompose the matrix weighted by the second moments of its inputs, instead of the matrix alone.",
        off="--no-grasp-whiten",
    ),
    Option(
        "grasp_refit",
        FLAG,
        "Fit the output factor of each low-rank pair to the calibration data by least squares.",
        off="--no-grasp-refit",
    ),
)

COMPENSATE = (
    Option(
        "compensate",
        one_of(*COMPENSATORS, plugins="onnxgrail.compensators"),
        "Compensation of the remaining weights: as in the GRAIL paper (grail), fitted to the original network (best), "
        "or none.",
        commands=(*NARROWING, "apply"),
    ),
    Option(
        "fit",
        some_of(FITS, "PARTS", empty="plain"),
        "Parts of best: ridge towards the current weights (prior), fitted biases (affine), step length chosen on "
        "held-out samples (blend), fit of later layers that lost nothing (downstream), whole windows of convolutions "
        "(patch); or none of them (plain).",
        commands=NARROWING,
    ),
    Option(
        "ridge",
        Value(kind="number", least=0),
        "Ridge parameter of grail, as a share of the mean second moment of the features.",
        commands=(),
    ),
    Option(
        "norms",
        one_of("none", "repair", "refit", "all"),
        "Afterwards restore the statistics of activations: mean and deviation after convolutions (repair), or fit "
        "scale and bias of normalizations by least squares (refit).",
        commands=NARROWING,
    ),
    Option(
        "closed_loop",
        FLAG,
        "Measure each block in the network narrowed so far, or in the original model, as --compensate best does.",
        off="--open-loop",
        commands=NARROWING,
    ),
)

REFINE = (
    Option(
        "refine",
        some_of(tuple(REFINEMENTS), "KINDS", empty="none"),
        "Fit to the original by gradient (needs torch), in this order: all weights block by block (laco), or "
        "as a whole (distill); normalizations alone (norms); additions to the input (ic).",
        commands=("compress", "refine"),
    ),
    Option(
        "ic_rank",
        COUNT,
        "Number of additions from which ic chooses.",
        metavar="R",
        otherwise="as many as 3 % of the parameters allow, at most 32",
        commands=("compress", "refine"),
    ),
    Option(
        "budget_seconds",
        Value(kind="number", metavar="S", above=0),
        "Time limit of the search within --max-loss, and of --refine.",
        otherwise="none",
        commands=("compress", "refine"),
    ),
)

"""The user's choices as plain data.

Nothing heavy is imported, because `--help` shows the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Metric = Literal["params", "macs", "size", "latency"]
Kind = Literal["conv", "mlp", "heads", "qk", "vo", "stream", "embedding", "rank"]
KINDS: tuple[Kind, ...] = ("conv", "mlp", "heads", "qk", "vo", "stream", "embedding", "rank")
INNER: tuple[Kind, ...] = ("qk", "vo")
"""Kinds of channels inside attention heads."""
WEIGHTS = {"int4": 4, "int8-weights": 8}
"""Bits of matrices by kind of quantization, for the kinds that store only weights in a few bits."""
EIGHT = ("int8", "int8-dynamic")
"""Kinds of quantization in which layers compute in 8 bits."""
WITHOUT_DATA = ("fp16", "int8-dynamic")
"""Kinds of quantization that fit nothing to data."""
CONTENTS = ("classes", "scores", "values", "embedding", "nothing")
"""Words for the content of an output."""
FITS = ("prior", "affine", "blend", "downstream", "patch")
MAX_LOSS = 0.01
"""The largest loss of a run that gives no amount."""
LAYERS_RATIO = 0.3
"""The ratio of a run that gives no amount and narrows nothing: low-rank layers have no search within a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The user's choices as plain data; the field names are the option names of the command line.

    One of `max_loss`, `ratio`, `unit_ratio`, the targets and `widths` sets how much is removed; the others are None. If
    all are None, `compress` takes a `max_loss` of 1%.
    """

    max_loss: float | None = None
    ratio: float | None = None
    unit_ratio: float | None = None
    minimize: Metric = "latency"
    target_params: str | None = None
    target_macs: str | None = None
    target_size: str | None = None
    target_latency: str | None = None
    widths: Mapping[str, int] | None = None
    bits: Mapping[str, int] | None = None
    only_bits: bool = False
    only_widths: bool = False
    effort: str = "normal"
    allocate: str = "auto"
    blocks: tuple[Kind, ...] = KINDS
    include: str | None = None
    exclude: str | None = None
    samples: int | None = None
    batch_size: int = 8
    selector: str = "auto"
    reducer: str = "prune"
    compensate: str = "best"
    fit: tuple[str, ...] = FITS
    ridge: float = 1e-3
    norms: str = "none"
    refine: tuple[str, ...] = ()
    method: tuple[str, ...] = ("grail",)
    grasp_layers: str | None = None
    grasp_retain: float = 0.1
    grasp_rank: str = "attribution"
    grasp_whiten: bool = False
    grasp_refit: bool = False
    ic_rank: int | None = None
    budget_seconds: float | None = None
    closed_loop: bool = False
    round_to: int = 8
    kv_io: bool = False
    keep_tokens: str | None = None
    keep_initializer_inputs: bool = False
    seed: int = 0
    cache_budget: str = "1G"
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    sequence_length: int | None = None
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    image_form: tuple[str, ...] | None = None
    simplify: bool = False
    quantize: str = "none"
    block_size: int = 32
    symmetric: bool = False
    accuracy_level: int = 0
    qdq: bool = False
    target: str | None = None
    strict: bool = False
    check: bool = True
    min_cosine: float | None = None

    @property
    def keeps_everything(self) -> bool:
        """Return True if the ratio is 0, so that nothing is narrowed."""
        return 0 in (self.ratio, self.unit_ratio)

    @property
    def chooses_bits(self) -> bool:
        """Return True if weights may get fewer bits, besides narrower blocks."""
        return self.wants_size and self.quantize == "none" and not self.only_widths

    @property
    def counts_bits(self) -> bool:
        """Return True if the bits of weights count for the size that decides how much is removed."""
        return self.chooses_bits or (self.target_size is not None and self.quantize in WEIGHTS)

    @property
    def uses_tool(self) -> bool:
        """Return True if a tool of ONNX Runtime quantizes the model in the end."""
        return self.quantize not in ("none", *WEIGHTS)

    @property
    def is_tight(self) -> bool:
        """Return True if new numbers must not make the file exceed a target."""
        return self.target_params is not None or self.target_size is not None

    @property
    def wants_size(self) -> bool:
        """Return True if the size of the file decides how much is removed."""
        return self.target_size is not None or (self.max_loss is not None and self.minimize == "size")

    @property
    def wants_latency(self) -> bool:
        """Return True if time on this machine decides how much is removed."""
        return self.target_latency is not None or (self.max_loss is not None and self.minimize == "latency")

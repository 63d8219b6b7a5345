"""Verdicts in words, always with their interval or a caveat.

All functions read plain data: a report, or the entries of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHARES = frozenset({"classes", "scores", "sequences", "text", "labels"})  # kinds whose value is a share
FAR = 0.1  # a result with a larger loss, or a larger lost share, is hardly usable
SILENT = "random inputs say nothing about quality"
SEEN = "the fit has seen these samples"
SAYS_NOTHING = "no measurable difference"

Data = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """The verdict on the worst output, in words.

    Attributes:
        output: its name and columns.
        measure: name of the measure; value: with its unit.
        extent: the interval, and the worst sample.
        where: number and kind of the samples.
        caveat: the reason why the value may be unreliable; empty if there is none.
        share: the value as a share, None if it is not a share.
        silent: True if the value means nothing.
        far: True if the result is hardly usable.
    """

    output: str
    measure: str
    value: str
    extent: str
    where: str
    caveat: str
    share: float | None
    silent: bool
    far: bool

    def __str__(self) -> str:
        of, place = f"{self.measure} {self.value}", f"output {self.output} on {self.where}"
        if self.silent:
            return f"not known, {self.caveat} ({of}, {place})"
        of += f" ({self.extent})" if self.extent else ""
        return f"{of}, {place}" + (f"; {self.caveat}" if self.caveat else "")


def headline_of(data: Data) -> Headline | None:
    """Return the verdict on the worst output of a report's model, None if nothing was compared."""
    last = last_of(data)
    return told(last["headline"], last["judged"]) if last.get("headline") else None


def last_of(data: Data) -> Data:
    """Return the entry of the model that was written: the quantized one if there is one."""
    return data.get("quantization") or data.get("verification") or {}


def told(verdict: Data, judged: Data) -> Headline:
    """Convert a verdict and the description of its samples to words."""
    silent = judged["on"] == "random"
    return Headline(
        output=", ".join(filter(None, (str(verdict["output"]), verdict["part"]))),
        measure=verdict["measure"],
        value=value(verdict),
        extent=extent(verdict),
        where=where(judged),
        caveat=caveat(judged),
        share=verdict["value"] if verdict["kind"] in SHARES | {"embedding"} else None,
        silent=silent,
        far=not silent and distance(verdict) > FAR,
    )


def advice(data: Data) -> list[str]:
    """Return suggestions for a report's result that is far from the original; none if it is near or not known."""
    found = headline_of(data)
    if found is None or not found.far:
        return []
    loss = last_of(data)["headline"].get("loss") or 0.0
    lost = f", loss {loss:.0%}" if found.share is not None and 1 - found.share < FAR < loss else ""
    far = f"output {found.output} is far from the original ({found.measure} {found.value}{lost})"
    ways = [*(["more real --data"] if data.get("calibration") else []), *_ways(data.get("recipe") or {})]
    better = f": {' or '.join(filter(None, (', '.join(ways[:-1]), ways[-1])))} bring it closer" if ways else ""
    return [f"{far}{better}"]


def _ways(recipe: Data) -> list[str]:
    """Return options under which less goes, or other units; none if nothing goes."""
    if "grail" not in recipe.get("method", ("grail",)):
        return ["fewer --grasp-layers", "a larger --grasp-retain"]
    amounts = ("ratio", "unit_ratio", "max_loss", *(key for key in recipe if key.startswith("target_")))
    asked = next((key for key in amounts if recipe.get(key) is not None), "ratio")
    if recipe.get(asked) == 0:
        return []
    less = f"a {'larger' if asked.startswith('target') else 'smaller'} --{asked.replace('_', '-')}"
    return [less] if recipe.get("selector") == "obs" else [less, "--selector obs"]


def where(judged: Data) -> str:
    """Return number and kind of the samples: `9 held-out samples`."""
    nouns = {"random": "random input", "given": "sample"}
    noun = nouns.get(judged["on"], f"{judged['on']} sample")
    count = judged.get("samples")
    return f"{noun}s" if count is None else f"{count:,} {noun}{'' if count == 1 else 's'}"


def caveat(judged: Data) -> str:
    """Return the reason why a value may be unreliable; empty for samples that no fit has used."""
    if judged["on"] == "random":
        return SILENT
    return SEEN if judged.get("seen") else ""


def distance(verdict: Data) -> float:
    """Return the loss, or the lost share if that is more; infinity for values that are not numbers."""
    loss, found = verdict.get("loss"), verdict.get("value")
    lost = 1 - found if verdict["higher"] and found is not None else 0.0
    return math.inf if _broken(verdict) else max(lost, loss or 0.0)


def value(verdict: Data) -> str:
    """Return the value with its unit, or a word if there is none."""
    found = verdict["value"]
    if _broken(verdict):
        return "not a number"
    if found is None:
        return "unknown" if verdict["loss"] is None else "infinite"
    return _number(verdict["kind"], found) + (" nats" if verdict["kind"] == "tokens" else "")


def _broken(verdict: Data) -> bool:
    return bool(verdict["details"].get("broken"))


def _number(kind: str, number: float) -> str:
    if kind in SHARES:
        return f"{number:.1%}".replace("%", " %")
    if kind == "embedding":
        return f"{number:.4f}"
    return f"{number:.2g}" if number < 1 else f"{number:,.2f}"


def extent(verdict: Data) -> str:
    """Return the interval and the worst sample: `35.6 to 60.0 %, lowest sample 12.0 %`.

    Samples that are all of one class are named too: they cannot show if classes are still told apart.
    """
    kind, interval, lowest = verdict["kind"], verdict["interval"], verdict["lowest"]
    words = []
    if interval is not None and None not in interval:
        low, high = (_number(kind, end) for end in interval)
        words.append(f"{low.removesuffix(' %')} to {high}" if low.endswith("%") else f"{low} to {high}")
    elif verdict["value"] is not None:
        words.append("one sample, no interval")
    if lowest is not None and kind == "classes":
        words.append(f"lowest margin {lowest:.2f}")
        words += ["all samples of one class"] if "one_class" in verdict["details"] else []
    elif lowest is not None:
        words.append(f"{'lowest' if verdict['higher'] else 'highest'} sample {_number(kind, lowest)}")
    return ", ".join(words)


def more(verdict: Data) -> str:
    """Return the further measures in words."""
    found = verdict["details"]
    words = []
    if "margin" in found:
        words.append(f"margin {found['margin']:.2f}, was {found['margin_reference']:.2f}")
    if "top_1_percent" in found and "overlap" not in verdict["measure"]:
        words.append(f"{_number('scores', found['top_1_percent'])} of the top 1 % the same")
    if "perplexity_factor" in found:
        words.append(f"perplexity of texts that the original writes times {found['perplexity_factor']:.3f}")
        words.append(f"top-1 {_number('classes', found['agreement'])} the same")
    if "worst_channel" in found:
        words.append(f"worst channel {found['channel']:.0f} {_number('values', found['worst_channel'])}")
    if "unexplained" in found:
        lost = found["unexplained"]  # above 1, the mean of all samples would be closer
        words.append(f"{_number('scores', lost) if lost < 1 else 'all'} of what differs between samples is lost")
    return ", ".join(words)


def sentence(verdict: Data) -> str:
    """Return a verdict in one line, without its output."""
    words = [f"{verdict['measure']} {value(verdict)}"]
    inside = extent(verdict)
    words[0] += f" ({inside})" if inside else ""
    return ", ".join(filter(None, (*words, more(verdict))))


# ---------------------------------------------------------------------------------------------------- latency


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The speed of a model relative to another: the ratio, and its 95 % confidence interval."""

    ratio: float
    low: float
    high: float

    @property
    def silent(self) -> bool:
        """Return True if noise hides which model is faster."""
        return self.low <= 1 <= self.high

    @property
    def between(self) -> str:
        """Return the interval in words."""
        return f"{self.low:.2f} to {self.high:.2f}"

    def __str__(self) -> str:
        if self.silent:
            return f"{SAYS_NOTHING} ({self.between} times as fast)"
        return f"{self.ratio:.2f} times as fast ({self.between})"


def speed(steps: Sequence[Data]) -> Speed | None:
    """Return the speed of the last timed model relative to the first; None if it was not measured.

    Args:
        steps: with ratio and interval, as in `latency` of a report.
    """
    ratio, interval = (steps[-1].get(key) for key in ("ratio", "interval")) if steps else (None, None)
    if ratio is None or interval is None:
        return None
    return Speed(ratio=ratio, low=interval[0], high=interval[1])

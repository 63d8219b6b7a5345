"""Verdicts in words, with what they are worth: every value comes with its interval or its caveat.

Everything here reads plain data: a report, or the entries of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHARES = frozenset({"classes", "scores", "labels"})  # kinds whose value is a share
FAR = 0.1  # loss, or what is missing of a share, from which on a result is hardly of use
SILENT = "random inputs say nothing about quality"
SEEN = "the fit has seen these samples"
SAYS_NOTHING = "no measurable difference"

Data = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """The verdict on the worst output, in words.

    Attributes:
        output: its name, and which columns.
        measure: what was measured; value: what was found, with its unit.
        extent: the interval, and the sample that is worst off.
        where: on how many samples of what.
        caveat: why that may say little; empty where nothing is held against it.
        share: the value as a share, None where it is none.
        silent: it says nothing at all.
        far: the result is hardly of use.
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
    """Return the verdict on the worst output of the model that a report is about, None where nothing was compared."""
    last = last_of(data)
    return told(last["headline"], judged_of(data, last)) if last.get("headline") else None


def last_of(data: Data) -> Data:
    """Return what was found about the model that was written: the quantized one, where there is one."""
    return data.get("quantization") or data.get("verification") or {}


def told(verdict: Data, judged: Data) -> Headline:
    """Return a verdict with its output in words, and with what judged it."""
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
        far=not silent and is_far(verdict),
    )


def judged_of(data: Data, entry: Data) -> Data:
    """Return what judged a model of a report; reports of before it was written down tell it otherwise."""
    if entry.get("judged"):
        return dict(entry["judged"])
    held, calibration = entry.get("held_out"), data.get("calibration") or {}
    outputs: Sequence[Data] = entry.get("outputs") or ({},)
    samples = held["samples"] if held else outputs[0].get("samples")
    on = "held-out" if held else "random" if calibration.get("synthetic") else "calibration"
    return {"on": on, "samples": samples, "seen": on == "calibration"}


def where(judged: Data) -> str:
    """Return on how many samples of what: `9 held-out samples`."""
    nouns = {"random": "random input", "given": "sample"}
    noun = nouns.get(judged["on"], f"{judged['on']} sample")
    count = judged.get("samples")
    return f"{noun}s" if count is None else f"{count:,} {noun}{'' if count == 1 else 's'}"


def caveat(judged: Data) -> str:
    """Return why a value may say little; empty for samples that no fit has seen."""
    if judged["on"] == "random":
        return SILENT
    return SEEN if judged.get("seen") else ""


def distance(verdict: Data) -> float:
    """Return the loss, or what is missing of a share where that is more; infinity for values that are no numbers."""
    loss, found = verdict.get("loss"), verdict.get("value")
    lost = 1 - found if verdict["higher"] and found is not None else 0.0
    return math.inf if _broken(verdict) else max(lost, loss or 0.0)


def is_far(verdict: Data) -> bool:
    """Return True where a result is hardly of use."""
    return distance(verdict) > FAR


def value(verdict: Data) -> str:
    """Return the value with its unit, or that there is none."""
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
    """Return the interval, and the sample that is worst off: `35.6 to 60.0 %, lowest sample 12.0 %`."""
    kind, interval, lowest = verdict["kind"], verdict["interval"], verdict["lowest"]
    words = []
    if interval is not None and None not in interval:
        low, high = (_number(kind, end) for end in interval)
        words.append(f"{low.removesuffix(' %')} to {high}" if low.endswith("%") else f"{low} to {high}")
    elif verdict["value"] is not None:
        words.append("one sample, no interval")
    if lowest is not None and kind == "classes":
        words.append(f"lowest margin {lowest:.2f}")
    elif lowest is not None:
        words.append(f"{'lowest' if verdict['higher'] else 'highest'} sample {_number(kind, lowest)}")
    return ", ".join(words)


def more(verdict: Data) -> str:
    """Return what else was measured, in words."""
    found = verdict["details"]
    words = []
    if "margin" in found:
        words.append(f"margin {found['margin']:.2f}, was {found['margin_reference']:.2f}")
    if "top_1_percent" in found and "overlap" not in verdict["measure"]:
        words.append(f"{_number('scores', found['top_1_percent'])} of the top 1 % the same")
    if "perplexity_factor" in found:
        words.append(f"perplexity times {found['perplexity_factor']:.3f}")
        words.append(f"top-1 {_number('classes', found['agreement'])} the same")
    if "worst_channel" in found:
        words.append(f"worst channel {found['channel']:.0f} {_number('values', found['worst_channel'])}")
    if "unexplained" in found:
        words.append(f"{_number('scores', found['unexplained'])} of what differs between samples is lost")
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
    """How many times as fast a model is as another: the ratio, and where it lies with 95 % confidence."""

    ratio: float
    low: float
    high: float

    @property
    def silent(self) -> bool:
        """Return True where noise hides which of the two is faster."""
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
    """Return how the last of some timed models does beside the first; None where that was not measured.

    Args:
        steps: with ratio and interval, as in `latency` of a report.
    """
    ratio, interval = (steps[-1].get(key) for key in ("ratio", "interval")) if steps else (None, None)
    if ratio is None or interval is None:
        return None
    return Speed(ratio=ratio, low=interval[0], high=interval[1])

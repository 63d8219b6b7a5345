"""The lines of a report: one per output with its measures, and accuracy if the right answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxgrail.fidelity.words import Data, distance, extent, last_of, more, sentence, value

SHOWN = 6  # outputs with a line of their own: a model with caches has two for every layer


def report_lines(data: Data) -> tuple[str, ...]:
    """Return the lines of a report without the headline.

    For random inputs these are only the outputs that were not compared. For a quantized model they include those of the
    narrowed model. For a model fitted to a reference they show the change.
    """
    narrowed, quantized = data.get("verification") or {}, data.get("quantization") or {}
    outputs = narrowed.get("outputs") or ()
    if (narrowed.get("judged") or {}).get("on") == "random":
        return not_compared(outputs)
    if data.get("reference"):
        return changed(data["reference"]["outputs_before"], outputs)
    if not quantized:
        return lines_of(outputs, top=last_of(data).get("headline"))
    after = lines_of(quantized["outputs"], mark=", quantized", top=quantized.get("headline"))
    return (*lines_of(outputs, mark=", narrowed"), *after)


def lines_of(
    outputs: Sequence[Data], *, mark: str = "", top: Data | None = None, rest: str = "see --report"
) -> tuple[str, ...]:
    """Return one line per output, only for the furthest if there are many.

    Args:
        outputs: entries of a report.
        mark: text that names the model.
        top: the verdict of the headline, which is not repeated.
        rest: where all outputs are listed.
    """
    near = [output for output in outputs if not output.get("not_compared")]
    shown = worst(near)
    lines = [line for output in shown if (line := _line(output, mark, top or {}))]
    if len(shown) < len(near):
        lines.append(f"{len(near) - len(shown)} more outputs are closer ({rest})")
    return (*lines, *not_compared(outputs))


def not_compared(outputs: Sequence[Data]) -> tuple[str, ...]:
    """Return a line with the outputs that have no distance and the reason; empty if all have one."""
    left = [f"{output['name']} ({output['not_compared']})" for output in outputs if output.get("not_compared")]
    more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
    return (f"Not compared: {', '.join(left[:SHOWN])}{more}",) if left else ()


def changed(before: Sequence[Data], after: Sequence[Data]) -> tuple[str, ...]:
    """Return lines with the distances of outputs to a reference before and after a fit."""
    lines = []
    known = {output["name"]: output for output in before}
    for output in worst(after):
        first: Any = known.get(output["name"], {})
        was = {verdict["part"]: value(verdict) for verdict in first.get("verdicts") or ()}
        for verdict in output.get("verdicts") or ():
            name = ", ".join(filter(None, (output["name"], verdict["part"])))
            change = f"{was.get(verdict['part'], '-')} -> {value(verdict)} ({extent(verdict)})"
            line = f"Output {name}: {verdict['measure']} {change} to the reference"
            lines.append(", ".join(filter(None, (line, scores(first, output)))))
    return tuple(lines)


def worst(outputs: Sequence[Data]) -> Sequence[Data]:
    """Return the outputs that get a line: all if they are few, else the furthest from the original."""
    if len(outputs) <= SHOWN:
        return outputs
    far = {output["name"]: max(map(distance, output.get("verdicts") or ()), default=0.0) for output in outputs}
    return sorted(outputs, key=lambda output: far[output["name"]], reverse=True)[: SHOWN - 1]


def _line(output: Data, mark: str, top: Data) -> str:
    words = []
    for verdict in output.get("verdicts") or ():
        told = (top.get("output"), top.get("part")) == (output["name"], verdict["part"])
        said = more(verdict) if told else sentence(verdict)
        words += [f"{verdict['part']}: {said}" if verdict["part"] else said] if said else []
    text = ", ".join(filter(None, ("; ".join(words), scores(output))))
    return f"Output {output['name']}{mark}: {text}" if text else ""


def scores(*outputs: Data) -> str:
    """Return the accuracy of the original and of the results if classes are known: `top-1 99.50 % -> 98.75 %`."""
    for key, label, show in (("top1", "top-1", _percent), ("perplexity", "perplexity", "{:.4f}".format)):
        if all(output.get(key) is not None for output in outputs):
            values = (outputs[0][f"{key}_reference"], *(output[key] for output in outputs))
            return f"{label} {' -> '.join(map(show, values))}"
    return ""


def _percent(share: float) -> str:
    return f"{share:.2%}".replace("%", " %")

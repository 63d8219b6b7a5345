"""Train the embedded language model: a four-layer Llama on characters.

    python -m onnxgrail.models.char_llama

takes about nine minutes on one CPU core and writes `char_llama.onnx`, its data files and its manifest entry.  The
network is `transformers.LlamaForCausalLM` itself, so the graph is what users of that library export: RMSNorm, rotary
embedding, grouped-query attention and a gated MLP.  The text is the documentation of Python (`_stdlib_text`).
"""

from __future__ import annotations

import platform
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from onnxgrail.models import _artifacts, _stdlib_text, load

if TYPE_CHECKING:
    from transformers import LlamaConfig

NAME = "char_llama"
SEED = 0
CONTEXT = 128
BATCH = 32
STEPS = 900
MUON_RATE = 2e-2
ADAM_RATE = 3e-3
WARM_UP = 50
WEIGHT_DECAY = 1e-2
CALIBRATION = 128
HELD_OUT = 64

Ids = npt.NDArray[np.int64]


class CharLlama(nn.Module):
    """A `LlamaForCausalLM` that takes only `input_ids` and returns only the logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        from transformers import LlamaForCausalLM

        self.llama = LlamaForCausalLM(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map characters `(batch, sequence)` to the logits `(batch, sequence, vocabulary)` of the next ones."""
        logits: Tensor = self.llama(input_ids=input_ids, use_cache=False).logits
        return logits


def configuration(**changes: int) -> LlamaConfig:
    """Return the configuration: four key-value groups of two query heads, so that 30 % and 50 % can be removed."""
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": len(_stdlib_text.ALPHABET),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2 * CONTEXT,
    }
    return LlamaConfig(
        **(sizes | changes),
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )


class Muon(torch.optim.Optimizer):
    """An optimizer with momentum whose update matrices are made orthogonal (Jordan et al. 2024).

    `torch.optim.Muon` computes in bfloat16, which is many times slower on CPUs without instructions for it.
    """

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        super().__init__(matrices, {"lr": MUON_RATE})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Move every matrix `(out, in)` by about `lr` per singular direction."""
        del closure
        for group in self.param_groups:
            for matrix in group["params"]:
                velocity = self.state[matrix].setdefault("velocity", torch.zeros_like(matrix))
                velocity.mul_(0.95).add_(matrix.grad)
                direction = orthogonal(matrix.grad + 0.95 * velocity)
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.mul_(1.0 - group["lr"] * WEIGHT_DECAY).sub_(direction, alpha=group["lr"] * scale)


def orthogonal(matrix: Tensor) -> Tensor:
    """Bring all singular values of `matrix` near 1 by a quintic Newton-Schulz iteration."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def windows(text: Ids, count: int, length: int, *, seed: int) -> Ids:
    """Cut `count` windows `(count, length)` out of `text` at random places; equal seeds give equal windows."""
    starts = np.random.default_rng(seed).integers(0, len(text) - length + 1, size=count)
    cut: Ids = text[starts[:, None] + np.arange(length)]
    return cut


def spread(text: Ids, count: int, length: int) -> Ids:
    """Cut `count` windows `(count, length)` out of `text`, evenly spaced from its start to its end."""
    starts = np.linspace(0, len(text) - length, num=count).astype(np.int64)
    cut: Ids = text[starts[:, None] + np.arange(length)]
    return cut


def train(model: nn.Module, text: Ids, *, steps: int = STEPS) -> float:
    """Fit `model` to the next character of `text`; return the mean loss of the last tenth of the steps.

    Muon trains the inner matrices, AdamW the embedding, the readout and the norms.  With AdamW alone the same
    loss takes about twice the steps.
    """
    matrices = [value for key, value in model.named_parameters() if value.ndim == 2 and ".layers." in key]
    others = [value for key, value in model.named_parameters() if value.ndim != 2 or ".layers." not in key]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: rate(step, steps)) for each in optimizers]
    losses: list[float] = []
    model.train()
    for step in range(steps):
        batch = torch.from_numpy(windows(text, BATCH, CONTEXT + 1, seed=SEED + step))
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}: loss {np.mean(losses[-50:]):.3f}", file=sys.stderr, flush=True)
    return float(np.mean(losses[-max(1, steps // 10) :]))


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up, constant until half-way, then linearly down to zero."""
    return min(1.0, (step + 1) / WARM_UP, 2.0 * (steps - step) / steps)


def main() -> None:
    """Train, write all files, and print the manifest entry."""
    _artifacts.seed_everything(SEED)
    training, unseen = (_stdlib_text.encode(text) for text in _stdlib_text.corpus())
    print(f"{len(training)} characters to train on, {len(unseen)} held out", file=sys.stderr)
    model = CharLlama(configuration())
    started = time.perf_counter()
    train(model, training)
    seconds = round(time.perf_counter() - started)
    files = load(NAME)
    calibration = windows(training, CALIBRATION, CONTEXT, seed=SEED)
    judged = spread(unseen, HELD_OUT, CONTEXT + 1)
    heldout = {"input_ids": judged[:, :-1], "labels": judged[:, 1:]}
    _artifacts.write(files, model, {"input_ids": calibration}, heldout, dynamic={0: "batch", 1: "sequence"})
    layers = model.llama.config.num_hidden_layers
    _artifacts.describe(
        files,
        task="next character of Python's own documentation",
        data=f"docstrings and pydoc topics of the standard library of CPython {platform.python_version()}",
        data_licence="PSF-2.0",
        judged={"dense": _artifacts.metric(files, model)},
        seconds=seconds,
        blocks={"mlp": layers, "heads": layers},
    )


if __name__ == "__main__":
    main()

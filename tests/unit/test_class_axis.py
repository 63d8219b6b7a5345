"""The axis of the classes among many positions, which may be the second or the last one, and the longer one."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.core import Floats
from onnxgrail.fidelity.clues import Clues
from onnxgrail.fidelity.kinds import parts_of

RNG = np.random.default_rng(7)


def marked(shape: tuple[int, ...], classes: int) -> Floats:
    """Return logits (*shape, classes) of runs of one class, as a trained network gives them."""
    labels = np.repeat(RNG.integers(classes, size=(*shape[:-1], -(-shape[-1] // 5))), 5, axis=-1)[..., : shape[-1]]
    return 4.0 * np.eye(classes)[labels] + RNG.standard_normal((*shape, classes))


@pytest.mark.parametrize("name", ["logits", "seg", "class_scores"])
@pytest.mark.parametrize(("positions", "classes"), [(128, 5), (128, 2), (25, 60), (12, 12)])
def test_classes_of_positions_are_found_in_either_order(name: str, positions: int, classes: int) -> None:
    last = marked((16, positions), classes)
    for logits, axis in ((last, 2), (last.transpose(0, 2, 1), 1)):
        (part,) = parts_of(name, [logits], Clues())
        assert (part.kind, part.form, part.axis) == ("scores", "logits", axis)


@pytest.mark.parametrize(("side", "classes"), [(32, 150), (64, 19)])
def test_a_map_may_have_more_classes_than_rows(side: int, classes: int) -> None:
    last = marked((4, side, side), classes)
    assert parts_of("logits", [last.transpose(0, 3, 1, 2)], Clues())[0].axis == 1
    assert parts_of("logits", [last], Clues())[0].axis == 3


def test_the_user_may_tell_classes_of_positions() -> None:
    logits = marked((16, 128), 5).transpose(0, 2, 1)
    (part,) = parts_of("y", [logits], Clues(contents={"y": "classes"}))
    assert (part.kind, part.axis) == ("scores", 1)

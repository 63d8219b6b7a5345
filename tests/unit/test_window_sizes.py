"""The output sizes of a convolution, from its window alone and from its windows."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.calibration.stream.rows import places, windows
from onnxgrail.graph.fittable.consumers import Window

CASES = [
    Window(kernel=(3, 5), strides=(1, 2), dilations=(1, 1), pads=((1, 1), (2, 0))),
    Window(kernel=(3, 2), strides=(2, 3), dilations=(2, 3), pads=((0, 0), (1, 2))),
    Window(kernel=(4, 3), strides=(3, 2), dilations=(1, 2), pads=None, first=True),
]


@pytest.mark.parametrize("window", CASES)
@pytest.mark.parametrize("sizes", [(9, 11), (12, 10), (7, 16)])
def test_sizes_are_those_of_all_windows(window: Window, sizes: tuple[int, int]) -> None:
    assert places(sizes, window) == windows(np.zeros((1, 2, *sizes)), window).shape[2:4]

"""Cases of the rule in `ops/recurrent.py`; the first axis of the tokens is time."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints

Steps = partial(Case, frame="tokens", width=4, units=(4, 8), ratios=(0.25, 0.5, 0.75))

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
ONE = "z = Squeeze(o, one)"
BOTH = "t = Transpose<perm=[0,2,1,3]>(o)\nz = Reshape(t, joined)"
LAST = "u = Squeeze(last, zero)\nz = Unsqueeze(u, zero)"


def weights(op: str, directions: int = 1, hidden: int = 4, width: int = 8) -> dict[str, tuple[int, ...] | np.ndarray]:
    """Input, recurrent and bias weights, and the axes that the bodies name."""
    rows = GATES[op] * hidden
    return {
        "wx": (directions, rows, width),
        "wh": (directions, rows, hidden),
        "wb": (directions, 2 * rows),
        "zero": ints(0),
        "one": ints(1),
        "joined": ints(0, 0, -1),
    }


STACKED = {
    "wxa": (2, 16, 8),
    "wha": (2, 16, 4),
    "wxb": (2, 16, 8),
    "whb": (2, 16, 4),
    "joined": ints(0, 0, -1),
}

CASES = [
    *(
        Steps(op=op, body=f"o = {op}<hidden_size=4>(h, wx, wh, wb)\n{ONE}", weights=weights(op), note="forward")
        for op in GATES
    ),
    *(
        Steps(
            op=op,
            body=f'o = {op}<hidden_size=4, direction="bidirectional">(h, wx, wh)\n{BOTH}',
            weights=weights(op, 2),
            width=8,
            note="both-ways",
        )
        for op in GATES
    ),
    Steps(
        op="LSTM",
        body=f"o, last, cell = LSTM<hidden_size=4>(h, wx, wh, wb, lengths, h0, c0, peep)\n{ONE}",
        weights={
            **weights("LSTM"),
            "lengths": np.array([3, 2, 3, 1, 3], np.int32),
            "h0": (1, 5, 4),
            "c0": (1, 5, 4),
            "peep": (1, 12),
        },
        note="everything",
    ),
    Steps(
        op="GRU",
        body=f"o, last = GRU<hidden_size=4, linear_before_reset=1>(h, wx, wh, wb, , h0)\n{ONE}",
        weights={**weights("GRU"), "h0": (1, 5, 4)},
        note="reset-later",
    ),
    Steps(
        op="LSTM",
        body=f"n = Shape<start=1, end=2>(x)\ns = Concat<axis=0>(one, n, four)\nh0 = Expand(none, s)\n"
        f"c0 = ConstantOfShape(s)\no = LSTM<hidden_size=4>(h, wx, wh, wb, , h0, c0)\n{ONE}",
        weights={**weights("LSTM"), "four": ints(4), "none": np.float32(0.5).reshape(())},
        note="filled-states",
    ),
    Steps(
        op="GRU",
        body=f"o = GRU<hidden_size=4>(h, wx, wh, wb, , h0)\n{ONE}",
        inputs="float[1,5,4] h0",
        weights=weights("GRU"),
        note="state-from-input",
    ),
    Steps(
        op="GRU",
        body="a = MatMul(x, w0)\nb = Slice(a, zero, one)\nh0 = Tanh(b)\n"
        f"o = GRU<hidden_size=4>(h, wx, wh, wb, , h0)\n{ONE}",
        weights={**weights("GRU"), "w0": (6, 4)},
        note="state-computed",
    ),
    Steps(
        op="GRU",
        body="a = MatMul(x, w0)\nb = Slice(a, zero, one)\nh0 = Softmax(b)\n"
        f"o = GRU<hidden_size=4>(h, wx, wh, wb, , h0)\n{ONE}",
        weights={**weights("GRU"), "w0": (6, 4)},
        note="state-without-channels",
    ),
    Steps(
        op="LSTM",
        body=f"o, last = LSTM<hidden_size=4>(h, wx, wh, wb)\n{LAST}",
        weights=weights("LSTM"),
        note="last-state-too",
    ),
    Steps(op="LSTM", body=f", last = LSTM<hidden_size=4>(h, wx, wh)\n{LAST}", weights=weights("LSTM"), note="last"),
    Steps(
        op="LSTM",
        body=f", , last = LSTM<hidden_size=4>(h, wx, wh)\n{LAST}",
        weights=weights("LSTM"),
        units=(8,),
        note="cell-only",
    ),
    Steps(
        op="LSTM",
        body='p = LSTM<hidden_size=4, direction="bidirectional">(h, wxa, wha)\n'
        "q = Transpose<perm=[0,2,1,3]>(p)\nr = Reshape(q, joined)\n"
        f'o = LSTM<hidden_size=4, direction="bidirectional">(r, wxb, whb)\n{BOTH}',
        weights=STACKED,
        width=8,
        units=(4, 4, 8),
        note="stacked",
    ),
    Steps(
        op="RNN",
        body="o = RNN<hidden_size=4>(h, wx, wh, wb, , h0)\np = RNN<hidden_size=4>(g, wx, wh, wb)\nq = Add(o, p)\n"
        "z = Squeeze(q, one)",
        weights={**weights("RNN"), "h0": (1, 5, 4)},
        note="tied-layers",
    ),
    Steps(
        op="GRU",
        body=f"w = Mul(wx, scale)\no = GRU<hidden_size=4>(h, w, wh)\n{ONE}",
        inputs="float[1] scale",
        weights=weights("GRU"),
        units=(),
        refused="computed at run time",
        note="computed-weight",
    ),
    Steps(
        op="RNN",
        body="t = Transpose<perm=[2,1,0]>(h)\no = RNN<hidden_size=4>(t, wx, wh)\np = Squeeze(o, one)\n"
        "z = Transpose<perm=[2,1,0]>(p)",
        weights=weights("RNN", width=3),
        width=8,
        units=(),
        refused="the steps and samples of a sequence",
        note="over-channels",
    ),
]

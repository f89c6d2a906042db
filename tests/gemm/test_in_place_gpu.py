"""What saves the layer memory, on the GPU and to the bit, at shapes of their own: Y over act, and slices of columns.

For the shapes of all the other tests `same_bits` has these, and dH over H.
"""

from __future__ import annotations

import pytest
import torch

from blazeproto import gemm
from blazeproto.gemm import Sizes
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import make_case

pytestmark = pytest.mark.gpu


def rows_like(case: Case, width: int) -> torch.Tensor:
    """Random (R, width), with NaN in rows without a pair."""
    made = torch.randn(case.dispatch.num_rows, width, device="cuda").bfloat16()
    made[len(case.row_pair) :] = torch.nan
    return made


@pytest.mark.parametrize("width", [8, 136, 256])
@pytest.mark.parametrize("biases", [False, True])
def test_y_may_lie_over_act(width: int, biases: bool) -> None:
    """Where a tile has whole rows of both. At an expert's end a neighbour reads rows it writes, and makes nothing of them."""
    case = make_case(Sizes(9000, width, width, 37, 3), "zipf", biases=biases, sentinels=0.1)
    act, used = rows_like(case, width), len(case.row_pair)
    apart = gemm.down_forward(
        act, case.down_proj, case.dispatch, bias=case.down_bias, y=torch.full_like(act, torch.nan)
    )
    for _ in range(5):
        over = act.clone()
        gemm.down_forward(over, case.down_proj, case.dispatch, bias=case.down_bias, y=over)
        assert torch.equal(over[:used], apart[:used]) and over[used:].isnan().all()


SLICES = (range(512), range(512, 768), range(768, 1000)), (range(1000),), (range(8), range(8, 520), range(520, 1000))


@pytest.mark.parametrize("slices", SLICES, ids=len)
@pytest.mark.parametrize("biases", [False, True])
def test_slices_of_columns_are_the_whole(slices: tuple[range, ...], biases: bool) -> None:
    d, n = 1000, 136
    case = make_case(Sizes(2000, d, n, 11, 3), "zipf", biases=biases, sentinels=0.1)
    act, dh, used = rows_like(case, n), rows_like(case, 2 * n), len(case.row_pair)
    products = (
        lambda columns, out: gemm.down_forward(
            act, case.down_proj, case.dispatch, bias=case.down_bias, columns=columns, y=out
        ),
        lambda columns, out: gemm.up_backward_act(dh, case.up_proj, case.dispatch, columns=columns, dx_rows=out),
    )
    for product in products:
        whole = product(None, rows_like(case, d))
        out = gemm.combine(whole, case.dispatch, scores=case.scores, out=torch.full_like(case.x, torch.nan))
        by_slices = torch.full_like(out, torch.nan)
        for columns in slices:
            part = product(columns, rows_like(case, len(columns)))
            assert torch.equal(part[:used], whole[:used, columns.start : columns.stop])
            gemm.combine(part, case.dispatch, scores=case.scores, columns=columns, out=by_slices)
            assert by_slices[:, columns.stop :].isnan().all()
        assert torch.equal(by_slices, out)

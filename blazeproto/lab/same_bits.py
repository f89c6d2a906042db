"""Other ways of calling the kernels, which must give bitwise identical results. Differences are named, in lines to report."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blazeproto import gemm
from blazeproto.gemm.linear import may_lie_over
from blazeproto.lab.calls import Case
from blazeproto.lab.oracle import pad_rows
from blazeproto.runtime.arch import arch_on


def wrong_in_order(case: Case, given: Mapping[str, Tensor], result: Mapping[str, Tensor]) -> list[str]:
    """Weight gradients by gathering, in ``result``, that are not to the bit what rows that lie in order already give."""
    num_rows = case.dispatch.num_rows
    x, d_out = (pad_rows(values[case.row_token], num_rows) for values in (case.x, case.d_out))
    dh, a_scaled = (pad_rows(given[name][: len(case.row_token)], num_rows) for name in ("dh", "a_scaled"))
    calls = {
        "d_down": partial(gemm.down_backward_weight, d_out, a_scaled, case.dispatch, gather=False),
        "d_up": partial(gemm.up_backward_weight, dh, x, case.dispatch, gather=False),
    }
    return [
        f"{name}{suffix}: not what rows in order give"
        for suffix in ("", "_f32")
        for name, call in calls.items()
        if not torch.equal(call(dw=torch.full_like(result[name + suffix], math.nan)), result[name + suffix])
    ]


def wrong_in_place(case: Case, given: Mapping[str, Tensor], result: Mapping[str, Tensor]) -> list[str]:
    """Outputs in ``result`` that come out otherwise over an input, or in two slices of columns."""
    dispatch, num_rows, used = case.dispatch, case.dispatch.num_rows, len(case.row_pair)
    act, h, dh = (pad_rows(given[name][:used], num_rows) for name in ("act", "h", "dh"))
    d, n = case.down_proj.shape[1:]
    y = partial(gemm.down_forward, act, case.down_proj, dispatch, bias=case.down_bias)
    dx_rows = partial(gemm.up_backward_act, dh, case.up_proj, dispatch)

    def in_slices(product: Callable[..., Tensor], out: str) -> Tensor:
        slices = [columns for columns in (range(d // 16 * 8), range(d // 16 * 8, d)) if columns]
        made = [product(columns=some, **{out: act.new_empty(num_rows, len(some))}) for some in slices]
        return torch.cat(made, dim=1)

    def in_use(output: Tensor) -> Tensor:
        return output[:used] if output.dim() == 2 else output  # d_scores: one for each pair

    others: dict[str, Any] = {"a_scaled": torch.empty_like(act), "d_scores": torch.empty_like(case.scores)}
    gemm.down_backward_act(
        case.d_out, case.down_proj, h, case.scores, dispatch, activation=case.activation, dh=h, **others
    )
    made = {
        "y, in slices": in_slices(y, "y"),
        "dx_rows, in slices": in_slices(dx_rows, "dx_rows"),
        "dh, over h": h,
        "a_scaled, with dh over h": others["a_scaled"],
    }
    if case.down_bias is None:  # of which d_scores has a share, added later
        made["d_scores, with dh over h"] = others["d_scores"]
    if may_lie_over(None, False, (d, n), d, arch_on(act.get_device())):
        made["y, over act"] = y(y=act)
    lines = [
        f"{name}: not what it is elsewhere and whole"
        for name, got in made.items()
        if not torch.equal(in_use(got), in_use(result[name.partition(",")[0]]))
    ]
    written_over = {"dh, over h": h, "y, over act": act}
    return lines + [f"{name}: wrote past row {used}" for name, a in written_over.items() if not a[used:].isnan().all()]

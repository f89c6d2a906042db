"""The steps of one forward and backward of a `dMoE` (`blazeproto.blocksparse`), as `blazeproto.lab.steps` has those of a `MoE`.

Router, dispatch and shared expert are a `MoE`'s. Between them are the products of the layer's picture (dmoe.py); matrices count
their padding, what is gathered or scattered does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from blazeproto import cost
from blazeproto.gemm.blocks import BLOCK
from blazeproto.lab.steps import LayerCall, Step, Traffic, product_calls, steps_of

INTS_A_BLOCK = 7  # of a topology's lists


def block_steps(s: LayerCall, load: Sequence[int], widths: Sequence[int]) -> list[Step]:
    """All steps, as `steps_of`.  load: of each expert, its pairs.  widths: of each, its hidden units."""
    heights = [-(-pairs // BLOCK) for pairs in load]
    M, N, G = BLOCK * sum(heights), sum(widths), s.sizes.halves
    B = sum(height * width // BLOCK for height, width in zip(heights, widths, strict=True))
    operations = 2.0 * B * BLOCK**2 * s.sizes.d  # of a product with act or its gradient

    def array(name: str, *shape: int, itemsize: int = s.itemsize) -> Traffic:
        return Traffic(name, shape, itemsize)

    x, out, d_out, d_x = (array(name, s.sizes.T, s.sizes.d) for name in ("x", "out", "dO", "dX"))
    rows, y, d_y, d_rows = (array(name, M, s.sizes.d) for name in ("X", "Y", "dY", "dX~"))
    used_y, used_d_rows = (padded._replace(shape=(s.rows, s.sizes.d)) for padded in (y, d_rows))
    (h, d_h), (act, d_act) = (
        (array(name, halves * B, BLOCK, BLOCK), array(f"d{name}", halves * B, BLOCK, BLOCK))
        for name, halves in (("H", G), ("act", 1))
    )
    up, d_up = (array(name, G * N, s.sizes.d) for name in (s.shown("up_proj"), s.shown("d_up")))
    down, d_down = (array(name, N, s.sizes.d) for name in ("down_proj", "d down_proj"))
    masters = tuple(weight._replace(itemsize=s.weight_itemsize) for weight in (up, down))
    scores, d_scores = (Traffic(name, s.by_pair, s.logit_itemsize) for name in ("S", "dS"))
    offsets, pairs = (
        array(name, length, itemsize=cost.ID_BYTES)
        for name, length in (("expert_token_offsets", s.sizes.E + 1), ("expert_pair_indices", s.places))
    )
    lists = tuple(
        array(name, length, itemsize=cost.ID_BYTES)
        for name, length in (
            ("row_pairs", M),
            ("pair_rows", s.pairs),
            ("blocks of H", INTS_A_BLOCK * G * B),
            ("blocks of act", INTS_A_BLOCK * B * (G > 1)),
        )
    )
    cast = [Step("forward", "weights to x's dtype", masters, (up, down), 0.0, (up, down))]
    forward = [
        *(cast if s.weight_itemsize != s.itemsize else []),
        Step("forward", "topology", (offsets, pairs), lists, 0.0, lists),
        Step("forward", "padded_gather", (x,), (rows,), 0.0, (rows,)),
        Step("forward", "SDD of H", (rows, up), (h,), G * operations, (h,)),
        Step("forward", "activation", (h,), (act,), 0.0, (act,)),
        Step("forward", "DSD of Y", (act, down), (y,), operations, (y,)),
        Step("forward", "padded_scatter", (used_y, scores), (out,), 0.0, (scores,)),
    ]
    backward = [
        Step("backward", "padded_gather", (d_out, scores), (d_y,)),
        Step("backward", "score_grad", (d_out, used_y), (d_scores,)),
        Step("backward", "DS^TD of d down_proj", (act, d_y), (d_down,), operations),
        Step("backward", "SDD of dact", (d_y, down), (d_act,), operations),
        Step("backward", "activation", (h, d_act), (d_h,)),
        Step("backward", f"DS^TD of {d_up.name}", (d_h, rows), (d_up,), G * operations),
        Step("backward", "DSD of dX~", (d_h, up), (d_rows,), G * operations),
        Step("backward", "padded_scatter", (used_d_rows,), (d_x,)),
    ]
    made = []
    for own in (forward, backward):
        phase = own[0].phase
        products = {*product_calls(s, phase), cast[0].name}
        steps = [step for step in steps_of(s) if step.phase == phase]
        first = next(index for index, step in enumerate(steps) if step.name in products)
        made += [*steps[:first], *own, *(step for step in steps[first:] if step.name not in products)]
    return made

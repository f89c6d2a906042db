"""`dMoE`, MegaBlocks' dropless layer: all experts are products with one block-diagonal matrix. MegaBlocks §4.1, Figures 3 and 4.

    x (T, d) --padded_gather--> X (M, d)          rows by expert, each expert's padded to a multiple of 128
    H = SDD(X, W_1^T)     blocks of (M, G N)      N: all experts' hidden units; a row has those of its expert
                                              G: 2 with a gate (gate and up), else 1
    A = act(H)            blocks of (M, N)
    Y = DSD(A, W_2)       (M, d)                  --padded_scatter, weighed by scores--> out (T, d)

    dY = S dO             --padded_gather--       dA = SDD(dY, W_2^T)      dW_2 = DS^T D(A, dY)
    dH = act'(H) dA                               dX = DSD(dH, W_1)        dW_1 = DS^T D(dH, X)

Both weights have a row for each hidden unit, (G N, d) and (N, d). The layer is a baseline, written to be read: it keeps X, H, A
and Y for backward, and takes no step that its formulation does not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from blazeproto import gemm
from blazeproto.activations import activation_named
from blazeproto.autograd.checks import check_choice, check_experts
from blazeproto.autograd.once import edge, once_differentiable
from blazeproto.autograd.operators import as_experts_see, cast, narrow_ids, ready
from blazeproto.autograd.options import Options
from blazeproto.autograd.private import refuse_batches, refuse_transforms
from blazeproto.blocksparse.baselines import PlainMoE
from blazeproto.blocksparse.rows import padded_gather, padded_scatter, score_grad
from blazeproto.blocksparse.topology import Padding, Topology, topology_of
from blazeproto.dispatch import Dispatch, build_dispatch, build_dispatch_varying
from blazeproto.gemm import block_activation
from blazeproto.gemm.blocks import BLOCK, Blocks
from blazeproto.router.choices import Hash
from blazeproto.runtime import checks

Blocked = tuple[Dispatch, Topology, Topology, Padding]  # and H's topology, A's, and what lies in their rows


class dMoE(PlainMoE):
    """`blazeproto.MoE` by block-sparse products (MegaBlocks): no token is dropped, experts may differ in width.

    Args:
        d_model, num_experts, top_k: d, E, K.
        d_expert: n, or a list of n_e, one an expert; multiples of 128, the side of a block.
        keywords: those of `blazeproto.MoE`. There are no biases, and only two of the experts' options may be chosen:
            ``activation`` and ``backend``.

    Parameters: gate_up_proj (2 N, d), an expert's gate rows then its up rows, or without a gate up_proj (N, d); down_proj (N, d),
    N being the sum of the n_e. A checkpoint of `blazeproto.MoE` loads, its down_proj transposed.

    On a Hopper GPU in bf16 the kernels run, and nothing waits for the device. Elsewhere the same products are torch operations on
    blocks, from a topology made on the host. torch.compile breaks its graph at the experts.

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """

    own_options = ("activation", "backend")

    def __init__(
        self, d_model: int, d_expert: int | Sequence[int], num_experts: int, top_k: int, **keywords: Any
    ) -> None:
        checks.integer("num_experts", num_experts, least=1)
        widths: tuple[int, ...] = tuple(d_expert) if isinstance(d_expert, Sequence) else (d_expert,) * num_experts
        if len(widths) != num_experts:
            raise ValueError(f"d_expert: expected a width for each of {num_experts} experts, got {len(widths)}")
        for width in widths:
            if checks.integer("d_expert", width, least=1) % BLOCK:
                raise ValueError(f"d_expert: expected multiples of {BLOCK}, got {width}")
        if keywords.get("bias"):
            raise ValueError("bias: expected False, as dMoE has none, got True")
        super().__init__(d_model, max(widths), num_experts, top_k, **{"backend": "auto"} | keywords)
        self.widths, like = widths, self.down_proj
        up_rows = sum(widths) * self.up_proj_weight.shape[1] // max(widths)
        self.register_parameter(self.up_name, nn.Parameter(like.new_empty(up_rows, d_model)))
        self.down_proj = nn.Parameter(like.new_empty(sum(widths), d_model))
        self.register_load_state_dict_pre_hook(_flattened)
        self.reset_parameters()

    @property
    def kernel_needs(self) -> tuple[str, ...]:
        """As `blazeproto.MoE.kernel_needs`."""
        return ("block-sparse",)

    def _down_shape(self) -> tuple[int, ...]:
        return sum(self.widths), self.d_model

    def extra_repr(self) -> str:
        """As `blazeproto.MoE` shows, with each expert's width where they differ."""
        shown = super().extra_repr()
        if len(set(self.widths)) == 1:
            return shown
        return shown.replace(f"d_expert={self.d_expert}", f"d_expert={list(self.widths)}", 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As `blazeproto.MoE`, and on a CPU with its numbers of the same seed: each expert uniform within 1 / sqrt(fan in)."""
        if "widths" not in vars(self):  # while MoE makes its own
            return
        self.up_proj_weight.uniform_(-(self.d_model**-0.5), self.d_model**-0.5)
        for begin, end in pairwise(accumulate(self.widths, initial=0)):
            drawn = self.down_proj.new_empty(self.d_model, end - begin)
            self.down_proj[begin:end] = drawn.uniform_(-((end - begin) ** -0.5), (end - begin) ** -0.5).mT

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _experts(  # type: ignore[override]
        self,
        x: Tensor,
        up_proj: Tensor,
        down_proj: Tensor,
        scores: Tensor,
        experts: Tensor,
        *,
        num_experts: int,
        options: Options,
        pair_tokens: Tensor | None,
        token_offsets: Tensor | None,
        **_: Any,
    ) -> Tensor:
        refuse_transforms("dMoE", (x, up_proj, down_proj, scores))
        # Experts that differ in width are one of all hidden units.
        check_experts(x, (up_proj[None],), down_proj.mT[None], None, None, None, None, num_experts=1, options=options)
        check_choice(x, scores, experts, None, pair_tokens, token_offsets, num_experts=num_experts, options=options)
        x, scores = as_experts_see(x, scores)
        up_proj, down_proj = cast(up_proj, x.dtype), cast(down_proj, x.dtype)
        if x.is_meta:  # the shape of the output, and what it depends on: ids without numbers have no topology
            return x + 0 * (up_proj.sum() + down_proj.sum() + scores.sum())
        runs = self.runs_on(x.dtype)
        if runs.startswith("nothing"):
            raise RuntimeError(f"backend: expected one that runs here, got {options.backend!r}: {runs}")
        on_gpu, ids = runs.startswith("hopper"), narrow_ids(experts)
        lists: Any = (ids,) if pair_tokens is None else (ids, pair_tokens, token_offsets)
        build: Any = build_dispatch if pair_tokens is None else build_dispatch_varying
        dispatch = build(*(ready(each) if on_gpu else each.cpu() for each in lists), num_experts)
        blocked = dispatch, *topology_of(dispatch, self.widths, activation_named(self.activation).halves)
        compute: Any = BlockExperts.apply if on_gpu else by_formulas
        arrays = (x, up_proj, down_proj, scores.flatten())
        made: Tensor = compute(*(map(ready, arrays) if on_gpu else arrays), blocked, self.activation)
        return made

    @torch.enable_grad()
    def prepare(self, num_tokens: int) -> None:
        """Compiles and loads what a forward and a backward of ``num_tokens`` tokens launch, the router's too, by running them.

        It does nothing if the kernels do not run.
        """
        checks.integer("num_tokens", num_tokens, least=0)
        if not self.runs_on().startswith("hopper"):
            return
        x = self.down_proj.new_zeros(num_tokens, self.d_model, dtype=torch.bfloat16, requires_grad=True)
        hashed = isinstance(getattr(self.router, "choice", None), Hash)
        out, _ = self(x, x.new_zeros(num_tokens, dtype=torch.int64) if hashed else None)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        torch.autograd.grad(out.sum(), (x, *trained), allow_unused=True)


def _flattened(module: dMoE, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A checkpoint's weights of `blazeproto.MoE`, turned into dMoE's. Those of other experts stay, so that torch refuses them."""
    sizes = (module.num_experts, module.up_proj_weight.shape[0] // module.num_experts, module.d_model)
    up, down = (f"{prefix}{name}" for name in (module.up_name, "down_proj"))
    if len(set(module.widths)) > 1:
        return
    if up in state and state[up].shape == sizes:
        state[up] = state[up].flatten(0, 1)
    if down in state and state[down].shape == (sizes[0], module.d_model, module.widths[0]):
        state[down] = state[down].mT.flatten(0, 1).contiguous()


class BlockExperts(torch.autograd.Function):
    """The module's picture, on a GPU: x (T, d), up_proj (G N, d), down_proj (N, d) bf16, scores (P,) fp32 → (T, d) bf16."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up_proj: Tensor, down_proj: Tensor, scores: Tensor, blocked: Blocked, activation: str
    ) -> Tensor:
        dispatch, up, down, padding = blocked
        rows = padded_gather(x, padding, dispatch)
        h = gemm.sdd(rows, up_proj, up, transpose_b=True)
        act = block_activation.block_activate(h, down, activation=activation)
        y = gemm.dsd(act, down_proj, down)
        ctx.save_for_backward(rows, h, act, y, up_proj, down_proj, scores, edge(x) if ctx.needs_input_grad[0] else None)
        ctx.blocked, ctx.activation = blocked, activation
        out: Tensor = padded_scatter(y, padding, dispatch, scores)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
        rows, h, act, y, up_proj, down_proj, scores, _ = saved  # with an edge to x
        dispatch, up, down, padding = ctx.blocked
        need_x, need_up, need_down, need_scores = ctx.needs_input_grad[:4]
        refuse_batches(d_out)
        d_out = ready(d_out)
        d_y = padded_gather(d_out, padding, dispatch, scores)
        d_scores = score_grad(d_out, y, padding, dispatch) if need_scores else None
        d_down = gemm.dsd(act, d_y, down, transpose_s=True) if need_down else None
        d_act = gemm.sdd(d_y, down_proj, down, transpose_b=True)
        d_h = block_activation.block_activate_backward(h, d_act, down, activation=ctx.activation)
        d_up = gemm.dsd(d_h, rows, up, transpose_s=True) if need_up else None
        d_x = padded_scatter(gemm.dsd(d_h, up_proj, up), padding, dispatch) if need_x else None
        return d_x, d_up, d_down, d_scores, None, None


def by_formulas(
    x: Tensor, up_proj: Tensor, down_proj: Tensor, scores: Tensor, blocked: Blocked, activation: str
) -> Tensor:
    """The same by torch operations that autograd differentiates, on any device. blocked: on the host."""
    dispatch, up, down, padding = blocked
    row = (padding.row_pairs >= 0).nonzero().flatten().to(x.device)
    pair = padding.row_pairs.to(x.device)[row]
    token = pair // dispatch.top_k if dispatch.top_k else dispatch.pair_tokens.to(x.device)[pair]
    rows = x.new_zeros(len(padding.row_pairs), x.shape[1]).index_copy(0, row, x[token])
    of_h, of_act = (Blocks(topology, torch.cat) for topology in (up, down))
    h = of_h.sampled(rows, up_proj.T)
    act = block_activation.formula(of_act, h, activation=activation)
    y = of_act.times(act, down_proj, transposed=False)
    out = torch.zeros_like(x, dtype=scores.dtype).index_add(0, token, scores[pair, None] * y[row])
    return out.to(x.dtype)

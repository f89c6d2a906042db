"""Programs that compute the experts of one layer: ours, and others through their own public interfaces."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from blazeproto.activations import activation_named
from blazeproto.autograd import moe_mlp
from blazeproto.autograd.chunks import WHOLE
from blazeproto.blocksparse import DroppingMoE, topology_of
from blazeproto.blocksparse import dmoe as block_layer
from blazeproto.dispatch import Dispatch, build_dispatch
from blazeproto.gemm import Sizes
from scripts.bench.common import inverse_of
from scripts.bench.peers import Build, LayerInputs, Program, backend_of, layer_program


def ours(
    shape: Sizes, inputs: LayerInputs, *, method: Any = "tiled", dispatch: Dispatch | None = None, **options: Any
) -> Program:
    """method: how the dispatch is built, in every forward; or a ``dispatch`` made beforehand.  options: of moe_mlp."""
    call: Any = partial(moe_mlp, num_experts=shape.E, **({"backend": backend_of(inputs)} | options))

    def forward() -> Any:
        given = dispatch
        if method != "tiled":  # which the layer's own operator is
            given = build_dispatch(inputs.experts, shape.E, method=method)
        chosen = {"topk_experts": inputs.experts} if given is None else {"dispatch": given}
        return call(inputs.x, inputs.gate_up_proj, inputs.down_proj, inputs.scores, **chosen)

    operator = torch.ops.blazeproto.dispatch.default
    return layer_program(
        inputs, forward, metadata=partial(operator, inputs.experts, shape.E, WHOLE, backend_of(inputs))
    )


def launch_kernels(inputs: LayerInputs, dispatch: Dispatch) -> tuple[object, ...]:
    """The kernels of a forward and a backward, launched as the operators of `moe_mlp` do, their outputs allocated."""
    from blazeproto.autograd import hopper_backend as backend
    from blazeproto.autograd.call import BackendStep, OuterSum

    x, d_out, scores = inputs.x.detach(), inputs.grad_output, inputs.scores.detach()
    up_proj, down_proj = inputs.gate_up_proj.detach(), inputs.down_proj.detach()
    rows = backend.rows_of(dispatch)
    up, down = BackendStep(rows, up_proj), BackendStep(rows, down_proj, scores=scores)
    h, act = backend.up_forward(up, x, None, None)
    out, dx = torch.empty_like(x), torch.empty_like(x)
    backend.down_forward(down, act, out, overwrite_act=True)
    del act
    dh, d_scores, a_scaled = backend.down_backward_act(down, (True, True, True), d_out, h, None, overwrite_h=True)
    assert dh is not None and a_scaled is not None
    d_down = backend.weight_gradient(rows, OuterSum(d_out, a_scaled, down_proj, None, gather=True, transposed=False))
    backend.up_backward_act(up, dh, dx)
    d_up = backend.weight_gradient(rows, OuterSum(x, dh, up_proj, None, gather=True, transposed=True))
    return out, dx, d_up, d_down, d_scores


def interleave_gate_up(gate_up_proj: torch.Tensor) -> torch.Tensor:
    """(E, 2n, d), gate rows then up rows -> rows gate_0, up_0, gate_1, up_1, ..., as SonicMoE's kernels read them."""
    num_experts, rows, width = gate_up_proj.shape
    return (
        gate_up_proj.detach().view(num_experts, 2, rows // 2, width).transpose(1, 2).reshape(num_experts, rows, width)
    )


def gate_then_up(interleaved: torch.Tensor) -> torch.Tensor:
    """The way back of `interleave_gate_up`, of a gradient that may lie in any order."""
    num_experts, rows, width = interleaved.shape
    return interleaved.reshape(num_experts, rows // 2, 2, width).transpose(1, 2).reshape(num_experts, rows, width)


def sonic(shape: Sizes, inputs: LayerInputs) -> Program:
    """SonicMoE (PyPI sonic-moe 0.1.2.post1, Python >= 3.12), tuned in full by its own autotuner.

    Its layer with fixed K takes router weights and chooses experts itself; the two autograd functions below its router are called
    directly, so that top-k stays outside, with the metadata kernel it uses between the two. Tuning happens at the first call for
    a shape and is kept on disk under QUACK_CACHE_DIR.
    """
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import (
        TC_topk_router_metadata_triton,
        _DownProjection,
        _UpProjection,
    )

    rows = shape.rows
    gate_up = interleave_gate_up(inputs.gate_up_proj).requires_grad_()
    counts = (shape.E, shape.E + 1, rows, rows, rows)  # frequency, offsets; gather, scatter and reverse scatter indices

    def metadata() -> list[torch.Tensor]:
        lists = [torch.empty(count, dtype=torch.int32, device=inputs.x.device) for count in counts]
        TC_topk_router_metadata_triton(inputs.experts, shape.E, *lists)
        return lists[1:]

    def forward() -> Any:
        offsets, *indices = metadata()
        # (2n, d, E) and (d, n, E), views; made here, since a view's node keeps the stream it was made on
        up_weight, down_weight = gate_up.permute(1, 2, 0), inputs.down_proj.permute(1, 2, 0)
        routing = (*indices, None, False, ActivationType.SWIGLU)  # no token offsets: K is fixed
        act, h = _UpProjection.apply(inputs.x, up_weight, None, offsets, rows, shape.K, *routing, False, False)
        return _DownProjection.apply(act, h, down_weight, None, inputs.scores, offsets, shape.T, shape.K, *routing)

    return layer_program(replace(inputs, gate_up_proj=gate_up), forward, metadata=metadata)


def torch_grouped(shape: Sizes, inputs: LayerInputs) -> Program:
    """By PyTorch's grouped products: sort, gather, grouped_mm, SiLU * up, grouped_mm, gather and combine.

    If K is 2 or 4, bmm's gradient of each token's rows has a reduction of 1 and rows of K, for which cuBLAS takes tiles of
    32 x 32 of the Ampere kind. docs/results.md says how much longer than forward backward takes.
    """
    grouped_mm = F.grouped_mm  # which `fp8_peers` puts another in the place of

    def metadata() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(token of each row, row of each pair, end of each expert's rows)."""
        by_expert, pairs = torch.sort(inputs.experts.flatten(), stable=True)
        each = torch.arange(shape.E, dtype=torch.int32, device=pairs.device)
        ends = torch.searchsorted(by_expert, each, right=True, out_int32=True)
        return pairs // shape.K, inverse_of(pairs), ends

    def forward() -> torch.Tensor:
        tokens, rows, ends = metadata()
        h = grouped_mm(inputs.x[tokens], inputs.gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = h.chunk(2, dim=1)
        y = grouped_mm(F.silu(gate) * up, inputs.down_proj.transpose(1, 2), offs=ends)
        per_token = y[rows].view(shape.T, shape.K, shape.d)
        return torch.bmm(inputs.scores.to(y.dtype).unsqueeze(1), per_token).squeeze(1)

    return layer_program(inputs, forward, metadata=metadata)


def scattermoe(shape: Sizes, inputs: LayerInputs) -> Program:
    """ScatterMoE (github.com/shawntan/scattermoe): grouped products in Triton that gather and scatter by themselves."""
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

    def metadata() -> Any:
        """(expert of each row, pair of each row, end of each expert's rows)."""
        return flatten_sort_count(inputs.experts.long(), num_experts=shape.E)

    def forward() -> Any:
        routing = metadata()
        h = parallel_linear(inputs.x, inputs.gate_up_proj.permute(0, 2, 1), shape.K, *routing, grouped_out=True)
        gate, up = h.chunk(2, dim=-1)
        act, gates = F.silu(gate) * up, inputs.scores.to(h.dtype)
        return parallel_linear(act, inputs.down_proj.permute(0, 2, 1), 1, *routing, grouped_in=True, gates=gates)

    return layer_program(inputs, forward, metadata=metadata)


def megablocks(shape: Sizes, inputs: LayerInputs, activation: str = "swiglu") -> Program:
    """MegaBlocks (github.com/databricks/megablocks) with block-sparse products; needs its compiled operators and stk.

    activation: swiglu, gelu, or silu without a gate.  ValueError: 2^31 numbers or more in its rows, padded to blocks of 128. Its
    kernels count in 32 bits and would access memory outside their tensors, after which the process can use no GPU.
    """
    numbers = (shape.rows + 127 * shape.E) * max(shape.d, shape.n)
    if numbers >= 1 << 31:
        raise ValueError(
            f"MegaBlocks counts in 32 bits: expected less than 2^31 numbers in its rows, got up to {numbers}"
        )
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import ParallelDroplessMLP

    arguments = Arguments(
        hidden_size=shape.d,
        ffn_hidden_size=shape.n,
        moe_num_experts=shape.E,
        moe_top_k=shape.K,
        mlp_type="glu" if shape.halves == 2 else "mlp",
        mlp_impl="sparse",
        activation_fn={"swiglu": F.silu, "silu": F.silu, "gelu": F.gelu}[activation],
        bias=False,
        fp16=False,
        bf16=True,
        device=inputs.x.device,
    )
    layer = ParallelDroplessMLP(arguments)
    names = ("w1", "v1")[: shape.halves]  # (E * n, d), one matrix for each role
    matrices = dict(zip(names, inputs.gate_up_proj.detach().chunk(len(names), dim=1), strict=True))
    matrices["w2"] = inputs.down_proj.detach().mT
    weights = tuple(getattr(layer.mlp, name) for name in matrices)
    with torch.no_grad():
        for weight, matrix in zip(weights, matrices.values(), strict=True):
            weight.copy_(matrix.reshape(-1, shape.d))

    def forward() -> Any:
        out = layer.sparse_forward_once(inputs.x, inputs.scores.to(inputs.x.dtype), inputs.experts)[0]
        return out.view(shape.T, shape.d)

    return Program(forward, (inputs.x, *weights, inputs.scores), inputs.grad_output, weights)


def dmoe(shape: Sizes, inputs: LayerInputs, activation: str = "swiglu") -> Program:
    """blazeproto's own `dMoE`: MegaBlocks' formulation, experts as block-sparse products.

    The dispatch, the topologies and the padding are made in every forward; X, H, act and Y are kept for backward.
    """
    up = inputs.gate_up_proj.detach().flatten(0, 1).contiguous().requires_grad_()
    down = inputs.down_proj.detach().mT.flatten(0, 1).contiguous().requires_grad_()
    halves = activation_named(activation).halves
    compute: Any = block_layer.BlockExperts.apply if inputs.x.is_cuda else block_layer.by_formulas

    def metadata() -> tuple[object, ...]:
        dispatch = build_dispatch(inputs.experts, shape.E)
        return dispatch, *topology_of(dispatch, shape.n, halves)

    def forward() -> Any:
        return compute(inputs.x, up, down, inputs.scores.flatten(), metadata(), activation)

    return layer_program(replace(inputs, gate_up_proj=up, down_proj=down), forward, metadata=metadata)


def dropping(
    shape: Sizes, inputs: LayerInputs, activation: str = "swiglu", capacity_factor: float | None = 1.0
) -> Program:
    """Experts with a capacity, dropped or padded to it, as one batched product (`blazeproto.blocksparse.DroppingMoE`).

    capacity_factor: None: as much as the largest load needs.
    """
    with torch.device("meta"):
        layer = DroppingMoE(*shape[1:5], activation=activation, capacity_factor=capacity_factor)
    absent: Any = dict.fromkeys(("up_bias", "down_bias", "pair_tokens", "token_offsets"))
    forward = partial(
        layer._experts,
        inputs.x,
        inputs.gate_up_proj,
        inputs.down_proj,
        inputs.scores,
        inputs.experts,
        num_experts=shape.E,
        options=layer.options,
        **absent,
    )
    return layer_program(inputs, forward, computes_layer=capacity_factor is None)


def plain(shape: Sizes, inputs: LayerInputs) -> Program:
    """SwiGLU experts as plain torch operations, an expert after the other, on tokens gathered in the order of a sort.

    autograd keeps what MoEBlaze §5.2 says of conventional kernels: a, b, sigmoid(a), SiLU(a) and their product; the routed
    tokens and the experts' outputs too.
    """

    def forward() -> torch.Tensor:
        by_expert, pairs = torch.sort(inputs.experts.flatten(), stable=True)
        loads = torch.bincount(by_expert, minlength=shape.E).tolist()
        outputs, routed = [], inputs.x[pairs // shape.K].split(loads)
        for x, gate_up, down in zip(routed, inputs.gate_up_proj.unbind(), inputs.down_proj.unbind(), strict=True):
            gate, up = gate_up.chunk(2)
            a, b = x @ gate.t(), x @ up.t()
            silu = a * torch.sigmoid(a)
            outputs.append((silu * b) @ down.t())
        per_token = torch.cat(outputs)[inverse_of(pairs)].view(shape.T, shape.K, shape.d)
        return torch.bmm(inputs.scores.to(per_token.dtype)[:, None], per_token)[:, 0]

    return layer_program(inputs, forward)


def bmm_bound(shape: Sizes, inputs: LayerInputs) -> Program:
    from scripts.bench.peers.bmm_bound import build  # which needs Triton

    return build(shape, inputs)


PEERS: dict[str, Build] = {  # by their names in results: SwiGLU layers
    "blazeproto": ours,
    "sonic": sonic,
    "bmm_ub": bmm_bound,
    "torch_grouped": torch_grouped,
    "scattermoe": scattermoe,
    "mb_sparse": megablocks,
}
DEFAULT_PEERS = ("blazeproto", "sonic", "bmm_ub", "torch_grouped")


def builds_of(names: Iterable[str]) -> dict[str, Build]:
    return {name: PEERS[name] for name in names}

"""The Mixture-of-Experts layer as an nn.Module: a router, the experts, and a shared expert if wanted.

>>> layer = MoE(d_model=512, d_expert=256, num_experts=16, top_k=4)
>>> out, stats = layer(x)  # x (..., d_model)
>>> loss = criterion(out) + stats.aux_loss
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from blazeproto.activations import activation_named
from blazeproto.autograd import QuantizedWeights, SavePolicy, moe_mlp, quantize_weights, saved_bytes
from blazeproto.autograd.backends import backend_on, check_device, device_index, what_runs
from blazeproto.autograd.call import STORED
from blazeproto.autograd.checkpoint import refuse_lost_gradients
from blazeproto.autograd.checks import check_dense, check_dtype, check_weights
from blazeproto.autograd.chunks import WHOLE, chunk_tokens_for, num_chunks
from blazeproto.autograd.kept import KeptWeights
from blazeproto.autograd.mlp import dispatched_mlp
from blazeproto.autograd.operators import autocast_dtype, gradient_rounded
from blazeproto.autograd.options import OPTION_NAMES, Options, documented, is_options, set_attributes, takes_options
from blazeproto.autograd.ranks import Dispatcher, refuse_ranks
from blazeproto.autograd.shared_expert import SharedExpert
from blazeproto.router.choices import check_keywords
from blazeproto.router.given import checked, routing_of
from blazeproto.router.router import Router, check_routing, make_router, router_keywords
from blazeproto.router.stats import MoEStats
from blazeproto.runtime.arch import ARCHES
from blazeproto.runtime.checks import boolean, fixed, integer, require
from blazeproto.runtime.shown import Shown
from blazeproto.stored.module import held, store

Init = TypeVar("Init", bound=Callable[..., None])
SIZES = ("d_model", "d_expert", "num_experts", "top_k", "widths")  # of a layer; dMoE has the last


def _with_known_keywords(init: Init) -> Init:
    """Decorates MoE.__init__: an unknown keyword is refused before Python misses the size that was meant by it."""

    @wraps(init)
    def checked(self: Any, *sizes: Any, **keywords: Any) -> None:
        check_keywords(keywords, {*router_keywords(), *inspect.signature(MoE).parameters})
        init(self, *sizes, **keywords)

    return checked  # type: ignore[return-value]


class MoE(nn.Module, Shown):
    """A Mixture-of-Experts layer, router included: ``out, stats = layer(x)``, x and out (..., d), stats a `MoEStats`.

    out_t = sum over the experts e chosen for t of S_te down_e(act(up_e(x_t))), plus the shared expert's output.

    Args:
        d_model, d_expert, num_experts, top_k: d, n, E, K; K is at least 1, and at most E unless ``router`` is a module. They are
            read-only afterwards, and a forward with a router or weights of other sizes raises ValueError.
        router: a name from ``blazeproto.router.ROUTERS`` ("top_k", "aux_free", "token_rounding", "expert_choice", ...),
            or a router module, which returns a ``Routing``.
        router_options: the keywords of `Router` for a named one, each a keyword here: ``MoE(..., aux_loss=0.01)``.
        bias: whether the experts' projections have biases.
        d_shared: width of the shared expert that every token visits (DeepSeekMoE §3.2); 0 for none.
        keep_quantized: how long quantized weights are kept, with precision="fp8" or "fp8_rollout": "step" frees them when an
            optimizer steps, "changed" fills their memory again after it, "used" keeps none (docs/fp8.md).
        storage: a name of `blazeproto.stored.FORMATS`, to which `store_weights` then quantizes the experts; None: as parameters.
        keywords: the fields of `blazeproto.autograd.Options`; each is an attribute of the layer, which may be set later.
        device, dtype: of the parameters. A layer of float32 takes x in bf16 or fp16 too and computes in x's dtype; the gradients
            of its experts' weights are then float32 sums, never rounded to x's dtype, to be added up over micro-batches.

    Parameters, shaped as in Hugging Face transformers 5 (Mixtral, Qwen3-MoE, DeepSeek-V3); a checkpoint's keys must be renamed,
    and gpt-oss's weights rearranged (docs/glossary.md):
        gate_up_proj (E, 2n, d), gate rows then up rows; without a gate up_proj (E, n, d)
        down_proj (E, d, n)
        gate_up_proj_bias (E, 2n) or up_proj_bias (E, n), down_proj_bias (E, d)

    Raises:
        TypeError, ValueError: an argument does not fit; it is named, with what was expected and what came.
    """

    _experts: Any = staticmethod(moe_mlp)  # a layer of another formulation has its own
    stored: dict[str, Any] = {}  # noqa: RUF012 - by a stored weight's name, how; replaced, never changed
    dispatcher: Dispatcher | None = None  # to other ranks' experts; `blazeproto.distributed.expert_parallel` sets it

    if TYPE_CHECKING:
        router: Router  # or a module of the user's, which returns a `Routing` too
        __call__: Callable[..., tuple[Tensor, MoEStats]]

        def __getattr__(self, name: str) -> Any: ...  # the options, properties that are made below

    @_with_known_keywords
    @takes_options(rest="router_options")
    def __init__(
        self,
        d_model: int,
        d_expert: int,
        num_experts: int,
        top_k: int,
        *,
        router: str | nn.Module = "top_k",
        bias: bool = False,
        d_shared: int = 0,
        keep_quantized: str = "step",
        storage: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        sizes = zip(SIZES, (d_model, d_expert, num_experts, top_k), strict=False)
        d_model, d_expert, num_experts, top_k = (integer(name, size, least=1) for name, size in sizes)
        d_shared = integer("d_shared", d_shared, least=0)
        boolean("bias", bias)
        check_dtype(dtype)
        check_device(device)
        options = Options(**{name: keywords.pop(name) for name in OPTION_NAMES if name in keywords})
        self.options = replace(options, save=SavePolicy(options.save))
        self.d_model, self.d_expert, self.num_experts, self.top_k = d_model, d_expert, num_experts, top_k
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        if isinstance(router, str):
            router = make_router(router, d_model, num_experts, top_k, **where, **keywords)
        elif not isinstance(router, nn.Module):
            raise TypeError(f"router: expected a name or a module, got {type(router).__name__}")
        elif keywords:
            raise TypeError(f"router: a module brings its own options, got {sorted(keywords)} too")
        self._check_router(router)
        self.router = cast(Router, router)
        entry = activation_named(options.activation)
        up_width, self.up_name = d_expert * entry.halves, entry.up_name
        self.register_parameter(self.up_name, nn.Parameter(torch.empty(num_experts, up_width, d_model, **where)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, d_model, d_expert, **where))
        up_bias = nn.Parameter(torch.empty(num_experts, up_width, **where)) if bias else None
        self.register_parameter(f"{self.up_name}_bias", up_bias)
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, d_model, **where)) if bias else None
        self.shared_expert = SharedExpert(d_model, d_shared, options.activation, **where) if d_shared else None
        self.quantized: QuantizedWeights | None = None  # see `quantize_weights`
        self.kept = KeptWeights(keep_quantized)
        if options.backend in ARCHES and self.down_proj.device.type != "meta":
            # A layer made on the host may move to the GPU later: what counts then is whether there is one.
            on_host = self.down_proj.device.type == "cpu" and torch.cuda.is_available()
            device = torch.device("cuda") if on_host else self.down_proj.device
            backend_on(options.backend, device, torch.bfloat16, num_experts, d_model, d_expert, needs=self.kernel_needs)
        self.reset_parameters()
        if storage is not None:
            self.store_weights(storage)

    def _check_router(self, router: nn.Module) -> None:
        for name in ("num_experts", "top_k"):
            if (routed := getattr(router, name, size := getattr(self, name))) != size:
                raise ValueError(f"router: expected {name}={size} as the layer has, got a router with {name}={routed}")

    def _down_shape(self) -> tuple[int, ...]:
        return self.num_experts, self.d_model, self.d_expert

    @property
    def up_proj_weight(self) -> Any:
        """``gate_up_proj``, or ``up_proj`` of an ungated layer: a parameter, or a `StoredWeight`."""
        return held(self, self.up_name) if self.stored else getattr(self, self.up_name)

    @property
    def down_proj_weight(self) -> Any:
        """``down_proj``, a parameter or a `StoredWeight`."""
        return held(self, "down_proj") if self.stored else self.down_proj

    @property
    def up_bias(self) -> nn.Parameter | None:
        """``gate_up_proj_bias``, or ``up_proj_bias`` of an ungated layer; None without biases."""
        return getattr(self, f"{self.up_name}_bias")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each expert as nn.Linear starts: uniform within 1 / sqrt(fan in), biases too. The router is left as it is."""
        d, n = self.d_model, self.d_expert
        weights = (getattr(self, self.up_name), self.up_bias, self.down_proj, self.down_proj_bias)
        for parameter, fan_in in zip(weights, (d, d, n, n), strict=True):
            if parameter is not None and parameter.is_floating_point():  # bytes of a stored weight stay
                parameter.uniform_(-(fan_in**-0.5), fan_in**-0.5)

    def forward(
        self,
        x: Tensor,
        token_ids: Tensor | None = None,
        mask: Tensor | None = None,
        experts: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> tuple[Tensor, MoEStats]:
        """x (..., d) floating point → out (..., d) in x's dtype (or autocast's, unless x is float64), and what the router did.

        token_ids: (...) integers, for hash routing alone.
        mask: (...) bool; default: all True. A token where it is False is padding: its output is 0, from the shared expert too;
        it takes no row, has no part in loads and losses, and gets no gradient; what x holds there, NaN too, changes nothing.
        experts, scores: (..., K) integers and floating point, such as an inference engine's. The router does not run and gets no
        gradient; scores get theirs if they need one; stats have no losses. An id outside [0, E) adds nothing.
        TypeError or ValueError names what does not fit.
        """
        check_dense("x", x)
        if x.dim() == 0 or x.shape[-1] != self.d_model:
            raise ValueError(f"x: expected shape (..., {self.d_model}), got {tuple(x.shape)}")
        self._check_router(self.router)
        up_proj, down_proj = self.up_proj_weight, self.down_proj_weight
        if self.dispatcher is None and down_proj.shape != self._down_shape():
            got = tuple(down_proj.shape)
            raise ValueError(f"down_proj: expected shape {self._down_shape()}, which the layer was made for, got {got}")
        tokens = x.reshape(-1, self.d_model)
        given, sizes = checked(self.router, x, token_ids, mask, experts, scores), (self.num_experts, self.top_k)
        routing = self.router(tokens, **given) if experts is None else routing_of(experts, scores, x, *sizes, mask)
        check_routing(routing, self.num_experts, mask)
        if self.shared_expert is not None and torch.compiler.is_compiling():
            tokens = gradient_rounded(tokens)  # of the experts and the shared one, before the router's comes on top
        biases = {"up_bias": self.up_bias, "down_bias": self.down_proj_bias}
        lists = {"pair_tokens": routing.pair_tokens, "token_offsets": routing.token_offsets}
        of_call: dict[str, Any] = {"num_experts": self.num_experts, "options": self.options, **biases, **lists}
        tensors = (tokens, up_proj, down_proj, routing.scores, routing.experts)
        overflow = None
        if self.quantized is not None:
            refuse_ranks(self.dispatcher, "quantized")
            of_call["quantized"] = self.quantized
        elif self.dispatcher is None and self.precision != "bf16":
            of_call["quantized"] = self.kept
        if self.dispatcher is not None:
            out, overflow = dispatched_mlp(self.dispatcher, *tensors, **of_call)
        else:
            out = self._experts(*tensors, **of_call)
            if self.options.row_capacity is not None:
                pairs = routing.load.sum(dim=0, keepdim=True, dtype=torch.int32)
                overflow = (pairs - self.options.row_capacity).clamp_min_(0)
        if self.shared_expert is not None:
            backend = "torch" if self.options.backend == "torch" else "auto"
            if mask is not None:
                tokens = tokens.where(mask.reshape(-1, 1), 0)
            shared = self.shared_expert(tokens, backend, self.options.save)
            out = out + (shared if mask is None else shared.where(mask.reshape(-1, 1), 0))
        aux_losses = refuse_lost_gradients(routing.aux_losses)
        stats = MoEStats(routing.load, aux_losses, overflow, routing.chosen_load)
        return out if x.dim() == 2 else out.view(x.shape), stats

    def store_weights(self, storage: str) -> None:
        """Quantize the experts' weights in place and freeze them.  storage: a format's name in `blazeproto.stored.FORMATS`.

        A weight is then a uint8 parameter of its name, and a uint8 buffer of its scales. TypeError or ValueError for another
        format, and for weights that its blocks do not divide or that are stored already; RuntimeError with a dispatcher.
        """
        refuse_ranks(self.dispatcher, "store_weights")
        require(self._experts is moe_mlp, "storage", "a layer whose experts moe_mlp computes", type(self).__name__)
        store(self, (self.up_name, "down_proj"), storage)

    def quantize_weights(self, dtype: torch.dtype | None = None) -> None:
        """With precision="fp8" or "fp8_rollout": quantize the experts' weights now, and keep them for all forwards to come.

        Call it again after each step of the optimizer, or a forward raises ValueError; ``layer.quantized = None`` ends it. dtype:
        of x. ValueError for another precision or stored weights, RuntimeError with a dispatcher; see `autograd.quantize_weights`.
        """
        refuse_ranks(self.dispatcher, "quantize_weights")
        require(self.precision != "bf16", "precision", "'fp8' or 'fp8_rollout'", repr(self.precision))
        require(not self.stored, "storage", "None for quantize_weights", "stored weights, which are kept as they are")
        weights = self.up_proj_weight, self.down_proj
        check_weights(*weights, self.up_bias, self.down_proj_bias, self.options)
        self.quantized = quantize_weights(*weights, dtype=dtype, backend=self.backend, precision=self.precision)

    def prepare(self, num_tokens: int) -> None:
        """Compile, in parallel, and load what the experts launch for ``num_tokens`` tokens: a CUDA-graph capture can do neither.

        Call it where the layer is on its GPU; on torch it does nothing. Kernels of the router and of stored weights come later.
        """
        integer("num_tokens", num_tokens, least=0)
        refuse_ranks(self.dispatcher, "prepare")
        if self.runs_on(torch.bfloat16) not in ARCHES:
            return
        from blazeproto import dispatch, gemm

        index, f32 = device_index(self.down_proj.device), self.down_proj.dtype == torch.float32
        for f32_weight_grads in {f32, f32 or self.workspace_bytes is not None}:  # chunks are summed in fp32
            gemm.prepare(
                *(self.d_model, self.d_expert, self.num_experts),
                None if self._varying_choice() is not None else self.top_k,
                activation=self.activation,
                up_bias=self.down_proj_bias is not None,
                down_bias=self.down_proj_bias is not None,
                fused=self.combine != "gather",
                fused_backward=self.combine == "fused_both",
                f32_weight_grads=f32_weight_grads,
                precision=self.options.precision,
                backend=self.runs_on(torch.bfloat16),
                device=index,
            )
        for tokens, top_k in self._dispatch_shapes(num_tokens):
            dispatch.prepare_dispatch(tokens, top_k, self.num_experts, row_capacity=self.row_capacity, device=index)

    def max_pairs(self, num_tokens: int) -> int:
        """The most pairs that the router makes of ``num_tokens`` tokens: T K, or the bound of a choice that varies."""
        choice = self._varying_choice()
        integer("num_tokens", num_tokens, least=0)
        most: int = num_tokens * self.top_k
        return most if choice is None else choice.max_pairs(num_tokens, self.num_experts, self.top_k)

    def _varying_choice(self) -> Any:
        """The router's choice if the number of experts per token varies with it, in the present mode; else None."""
        choice: Any = getattr(self.router, "choice", None)
        return None if not hasattr(choice, "max_pairs") or (choice.eval_top_k and not self.training) else choice

    def _dispatch_shapes(self, num_tokens: int) -> set[tuple[int, int]]:
        """(tokens, experts per token) of every dispatch in a forward pass; pairs with one expert each where they vary."""
        choice = self._varying_choice()
        if choice is not None:
            return {(self.max_pairs(num_tokens), 1)}
        chunk = self._chunk_tokens(num_tokens, torch.bfloat16.itemsize)
        lengths = {num_tokens} if chunk == WHOLE else {chunk, num_tokens % chunk or chunk}
        if self.row_capacity is not None:  # which is of the whole batch, in chunks too
            lengths.add(num_tokens)
        return {(length, self.top_k) for length in lengths}

    def _chunk_tokens(self, num_tokens: int, itemsize: int) -> int:
        sizes = (num_tokens, self.top_k, self.d_model, self.d_expert, self.activation, itemsize)
        return chunk_tokens_for(self.workspace_bytes, *sizes, self.row_capacity, combine=self.combine)

    def saved_bytes(self, num_tokens: int, dtype: torch.dtype | None = None, *, input_grad: bool = True) -> int:
        """Bytes that the experts keep for backward for ``num_tokens`` tokens; router and shared expert keep their own, and
        ``quantized`` counts as weights. 0 where neither x nor the router nor the experts need a gradient.

        dtype: of x as the experts see it; default: autocast's if it is enabled, else the weights' dtype.
        input_grad: whether x needs a gradient.
        """
        check_dtype(dtype)
        boolean("input_grad", input_grad)
        refuse_ranks(self.dispatcher, "saved_bytes")
        if dtype is None:
            dtype = self.down_proj_weight.dtype
            if dtype != torch.float64:
                dtype = autocast_dtype(self.down_proj.device.type) or dtype
        integer("num_tokens", num_tokens, least=0)
        up, down, *biases = (self.up_proj_weight, self.down_proj_weight, self.up_bias, self.down_proj_bias)
        trained = (up, down, *(bias for bias in biases if bias is not None), *self.router.parameters())
        if not (input_grad or any(parameter.requires_grad for parameter in trained)):
            return 0
        choice, itemsize = self._varying_choice(), dtype.itemsize
        return saved_bytes(
            self.options.policy(trains_down=down.requires_grad),
            trains_up=up.requires_grad,
            num_tokens=num_tokens,
            d_model=self.d_model,
            d_expert=self.d_expert,
            num_experts=self.num_experts,
            top_k=self.top_k,
            activation=self.activation,
            itemsize=itemsize,
            num_chunks=num_chunks(num_tokens, self._chunk_tokens(num_tokens, itemsize)),
            row_capacity=self.row_capacity,
            varying_pairs=None if choice is None else self.max_pairs(num_tokens),
            precision=self.options.precision,
            keep_transposed=input_grad
            and self.keep_transposed
            and not (self.quantized or self.kept.keeps(up, down) or self.stored),
        )

    def runs_on(self, dtype: torch.dtype | None = None) -> str:
        """The backend that computes the experts, and why not the kernels: "hopper", "ampere", "torch", or "nothing".

        dtype: of x, as the experts see it; default: bfloat16 for weights in float32, else the weights' dtype.
        """
        check_dtype(dtype)
        dtype = dtype or {torch.float32: torch.bfloat16}.get(own := self.down_proj_weight.dtype, own)
        sizes = self.num_experts, self.d_model, self.d_expert
        return what_runs(self.backend, self.down_proj.device, dtype, *sizes, needs=self.kernel_needs)

    @property
    def kernel_needs(self) -> tuple[str, ...]:
        """The ``extras`` of an `Arch` that the experts' kernels need."""
        return self.options.needs + STORED * bool(self.stored)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "options" and not is_options(value):
            raise TypeError(f"options: expected blazeproto.autograd.Options, got {type(value).__name__}")
        if name == "options" and (shared := self._modules.get("shared_expert")) is not None:
            shared.activation = value.activation
        if hasattr(value, "device_mesh"):  # FSDP, which takes away after a forward what it gathers for it
            self.kept = KeptWeights("used")
        fixed(self, name, value, SIZES)
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Sizes and options, and what ``backend="auto"`` is here, for the module's repr."""
        biases = ", bias=True" if self.down_proj_bias is not None else ""
        found = f" ({self.runs_on()})" if self.backend == "auto" else ""
        found += "" if self.precision == "bf16" else f", precision={self.precision}"
        found += f", kept={nbytes} bytes of quantized weights" if (nbytes := self.kept.nbytes) else ""
        found += "" if self.quantized is None else f", quantized={self.quantized.nbytes} bytes of weights"
        found += "".join(f", {name} stored as {how!r}" for name, (how, _) in self.stored.items())
        found += "" if self.dispatcher is None else f", dispatcher={self.dispatcher}"
        return (
            f"d_model={self.d_model}, d_expert={self.d_expert}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"activation={self.activation}{biases}, save={self.save}, backend={self.backend}{found}"
        )


MoE.__doc__ = documented(MoE.__doc__)
set_attributes(MoE)

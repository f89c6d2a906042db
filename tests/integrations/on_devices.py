"""Models, layers and training steps of transformers on any device: of real widths on a GPU, tiny on a CPU. And how what our
experts compute there is compared with eager, within the bounds of `blazeproto.lab.accuracy`.

A router's choice between two almost equal experts is a matter of rounding. So that it is not taken for an error, layers that are
compared with float64 are given the ids that eager chose (`give_choices`).
"""

import copy
import importlib
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from blazeproto.lab.accuracy import POOL_ELEMENTS, Pool
from tests.integrations import families

Results = dict[str, Tensor]

SIZES: dict[str, dict[str, dict[str, int]]] = {
    "qwen3_moe": {
        "cuda": {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 4096,
        },
        "cpu": {
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "intermediate_size": 96,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
        },
    },
    "gpt_oss": {  # of both sizes, with fewer experts
        "cuda": {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
        "cpu": {
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    },
}
# Of models of several layers, which are cloned a lot.
MODEL_SIZES: dict[str, dict[str, dict[str, int]]] = {
    "qwen3_moe": {"cuda": {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32}, "cpu": {}},
    "gpt_oss": {"cuda": {"hidden_size": 1024, "intermediate_size": 512}, "cpu": {}},
}
BATCH = {"cuda": (2, 512), "cpu": (2, 40)}  # sequences, and tokens of each
BACKEND = {"cuda": "inductor", "cpu": "aot_eager"}  # of torch.compile
SLACK = {"cuda": 1.0, "cpu": 1.3}  # of the bounds, where outputs have few elements


def config_of(family: str, device: str, **options: Any) -> Any:
    """A configuration with the sizes that the device takes; scores that sum to 1, as `GivenRouter` makes them."""
    from transformers import CONFIG_MAPPING

    sizes = {"num_hidden_layers": 1, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return CONFIG_MAPPING[family](**{**sizes, **SIZES[family][device], "norm_topk_prob": True, **options})


def build(family: str, device: str, experts_implementation: str = "eager", **options: Any) -> Any:
    """A language model in bf16, with random weights that make every gradient matter."""
    from transformers import AutoModelForCausalLM

    if options.get("num_hidden_layers", 1) > 1:
        options = MODEL_SIZES[family][device] | options

    attention = "eager" if family == "gpt_oss" else "sdpa"  # which gpt_oss doesn't have
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(family, device, **options),
            attn_implementation=attention,
            experts_implementation=experts_implementation,
            dtype=torch.bfloat16,
        )
    families.randomise(model)
    return model


def token_ids(device: str, seed: int = 1, size: tuple[int, int] | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, size or BATCH[device], generator=generator).to(device)


# --- Comparing -----------------------------------------------------------------------------------------------------------


def add_to_pool(pool: Pool, ours: Results, eager: Results, exact: Results) -> None:
    """Small outputs share one name: alone they have too few elements to judge by."""
    assert ours.keys() == eager.keys() == exact.keys()
    for name, wanted in exact.items():
        assert ours[name].dtype == eager[name].dtype, name
        pool.add(name if wanted.numel() >= POOL_ELEMENTS else "small", ours[name], eager[name], wanted)


def distance(a: Results, b: Results) -> float:
    """The root of the sum of the tensors' squared relative differences."""
    assert a.keys() == b.keys()
    pairs = ((a[name].double(), b[name].double()) for name in a)
    return sum(float((x - y).square().sum() / y.square().sum().clamp_min(1e-30)) for x, y in pairs) ** 0.5


# --- Routing -------------------------------------------------------------------------------------------------------------


class GivenRouter(nn.Module):
    """A router that is told what to choose. Its scores are the softmax of what it makes of these."""

    def __init__(self, router: nn.Module, ids: Tensor) -> None:
        super().__init__()
        self.router, self.ids = router, ids

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, _ = self.router(x)
        chosen = logits.to(torch.promote_types(logits.dtype, torch.float32)).gather(1, self.ids)
        return logits, chosen.softmax(dim=1).to(scores.dtype), self.ids


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module).__name__.endswith("TopKRouter")}


def record_choices(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """The ids that each router of a model chooses in a run."""
    found: dict[str, Tensor] = {}
    hooks = [
        router.register_forward_hook(lambda _, __, out, name=name: found.__setitem__(name, out[2]))
        for name, router in routers_of(model).items()
    ]
    run()
    for hook in hooks:
        hook.remove()
    assert found
    return found


def give_choices(model: nn.Module, choices: dict[str, Tensor]) -> None:
    """From now on each router chooses these ids, and those that are given next time."""
    for name, ids in choices.items():
        router = model.get_submodule(name)
        if isinstance(router, GivenRouter):
            router.ids.copy_(ids)
        else:
            model.set_submodule(name, GivenRouter(router, ids.clone()))


# --- A decoder layer -----------------------------------------------------------------------------------------------------


def layer_inputs(model: Any, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """x and the output's gradient, both of unit scale."""
    generator = torch.Generator().manual_seed(seed)
    size = (*BATCH[device], model.config.hidden_size)
    x, d_out = (torch.randn(size, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    return x, d_out


def run_layer(model: Any, x: Tensor, d_out: Tensor, call: Callable[..., Any] | None = None) -> Results:
    """Forward and backward of a model's first decoder layer: the output, and the gradients of x and of every parameter."""
    layer = model.model.layers[0]
    model.zero_grad()
    x = x.to(next(layer.parameters()).dtype).clone().requires_grad_()
    positions = torch.arange(x.shape[1], device=x.device)[None]
    embeddings = model.model.rotary_emb(x, positions)
    out = (layer if call is None else call)(
        x, attention_mask=None, position_ids=positions, position_embeddings=embeddings
    )
    out.backward(d_out.to(out.dtype))
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert x.grad is not None and not missing, f"no gradient of {missing}"
    return {"out": out.detach(), "x": x.grad, **gradients}


def compare_layers(pool: Pool, model: Any, device: str, seeds: Iterable[int], backend: str | None = None) -> None:
    """The errors of a bf16 model's first decoder layer: ours, compiled by a backend or not, beside eager and float64."""
    exact, given = exact_copy(model), copy.deepcopy(model)
    layer = given.model.layers[0]
    call = compiled(layer, backend) if backend else layer
    model.set_experts_implementation("eager")
    for seed in seeds:
        x, d_out = layer_inputs(model, device, seed)
        choices = record_choices(model, partial(run_layer, model, x, d_out))
        for each in (given, exact):
            give_choices(each, choices)
        given.set_experts_implementation("eager")
        eager = run_layer(given, x, d_out)
        given.set_experts_implementation("blazeproto")
        add_to_pool(pool, run_layer(given, x, d_out, call), eager, run_layer(exact, x, d_out))


def compiled(layer: nn.Module, backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(layer, backend=backend, fullgraph=True)


def exact_copy(model: Any) -> Any:
    """The same model in float64, with eager experts."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    return exact


# --- An experts module ---------------------------------------------------------------------------------------------------


def experts_module(family: str, device: str) -> Any:
    """Without its model, in bf16."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = {"qwen3_moe": "Qwen3MoeExperts", "gpt_oss": "GptOssExperts"}[family]
    with torch.device(device):
        experts = getattr(module, kind)(config_of(family, device)).bfloat16()
    families.randomise(experts)
    return experts


def experts_inputs(experts: Any, device: str, seed: int = 2) -> SimpleNamespace:
    """x, ids, scores and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    tokens, config = BATCH[device][0] * BATCH[device][1], experts.config

    def normal() -> Tensor:
        return torch.randn(tokens, config.hidden_size, generator=generator).to(device, torch.bfloat16)

    preference = torch.rand(tokens, experts.num_experts, generator=generator)
    ids = preference.topk(config.num_experts_per_tok).indices.to(device)
    scores = torch.rand(ids.shape, generator=generator).add(0.05).to(device, torch.bfloat16)
    return SimpleNamespace(x=normal(), ids=ids, scores=scores, d_out=normal())


def run_experts(experts: Any, implementation: str, inputs: SimpleNamespace) -> Results:
    """Forward and backward: the output, and the gradients of x, of the scores and of every weight."""
    dtype = experts.down_proj.dtype
    x, scores = (tensor.detach().to(dtype).clone().requires_grad_() for tensor in (inputs.x, inputs.scores))
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    out = experts(x, inputs.ids, scores)
    out.backward(inputs.d_out.to(dtype))
    gradients = {name: p.grad for name, p in experts.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "scores": scores.grad, **gradients}


# --- A training step -----------------------------------------------------------------------------------------------------


class TrainingStep:
    """Forward, loss, backward and SGD of a model on fixed inputs; what its experts took and gave in the last call.

    `capture` makes it a CUDA graph; on another device a replay is a call. The attention's mask is given: without one transformers
    looks at the positions to leave it out, which it doesn't under capture, and attention would run on other kernels there.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids = model.train(), ids
        length = ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        least = torch.finfo(torch.bfloat16).min
        mask = torch.zeros(length, length, dtype=torch.bfloat16, device=ids.device).masked_fill(future, least)
        mask = mask.expand(len(ids), 1, length, length).contiguous()
        by_kind = {"full_attention": mask, "sliding_attention": mask}
        self.mask = by_kind if model.config.model_type == "gpt_oss" else mask
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.begin = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.experts = families.experts_of(model)
        self.seen: dict[str, Results] = {name: {} for name in self.experts}
        for name, experts in self.experts.items():
            experts.register_forward_pre_hook(self._watch_inputs(self.seen[name]))
            experts.register_forward_hook(self._watch_output(self.seen[name]))

    @staticmethod
    def _watch_inputs(seen: Results) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            x, ids, scores = (tensor.clone() for tensor in args)  # gradients of these are of the experts alone
            seen.update(x=x.detach(), ids=ids, scores=scores.detach())
            if torch.is_grad_enabled():  # not so in the first pass of a reentrant checkpoint
                x.register_hook(lambda gradient: seen.__setitem__("d_x", gradient.clone()))
                scores.register_hook(lambda gradient: seen.__setitem__("d_scores", gradient.clone()))
            return x, ids, scores

        return hook

    @staticmethod
    def _watch_output(seen: Results) -> Callable[..., Any]:
        def hook(_: nn.Module, __: object, out: Tensor) -> None:
            seen["out"] = out.detach().clone()
            if torch.is_grad_enabled():
                out.register_hook(lambda gradient: seen.__setitem__("d_out", gradient.clone()))

        return hook

    def restore(self) -> None:
        """The weights that it began with."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.begin[name])

    def step(self) -> None:
        loss = self.model(input_ids=self.ids, labels=self.ids, attention_mask=self.mask, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()  # with its graph the nodes of this step would live on, and the stream that they know

    def gradients(self) -> Results:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def collect(self, loss: Tensor, gradients: Results) -> Results:
        """Copies of the loss, the gradients and the new weights."""
        copies = {f"gradient of {name}": gradient.clone() for name, gradient in gradients.items()}
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return {"loss": loss.clone(), **copies, **weights}

    def __call__(self) -> Results:
        """A plain step from the first weights."""
        self.restore()
        self.optimizer.zero_grad()
        self.step()
        return self.collect(self.loss, self.gradients())

    def capture(self) -> Callable[[], Results]:
        """A replay from the first weights. What warms it up runs on the stream that captures: a gradient's accumulation keeps
        the stream that it first ran on."""
        if self.ids.device.type != "cuda":
            return self
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self()
        torch.cuda.synchronize()
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.step()
        # The graph's own memory, which plain steps don't write to; they have other gradients.
        loss, gradients, seen = self.loss, self.gradients(), {name: dict(each) for name, each in self.seen.items()}

        def replay() -> Results:
            self.restore()
            graph.replay()
            torch.cuda.synchronize()
            for name, each in seen.items():
                self.seen[name].update(each)
            return self.collect(loss, gradients)

        return replay

"""The gradients of every expert's weights, in bf16 and in fp8, beside float64's: of one batch, at the model's first weights.

A forward and a backward of the model, in bf16, give each layer's tokens, choice, scores and the gradient of its output. From
these the layer's weight gradients are computed again in each precision, and in float64 of the same bf16 tokens and the weights as
they are. The head's weights, which begin at zero and would leave no gradient, are drawn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from blazeproto.autograd import moe_mlp
from scripts.lm.model import GPT, Batches, load_data
from scripts.lm.settings import Config

Row = dict[str, Any]
WEIGHTS = ("gate_up_proj", "down_proj")


def weight_gradients(call: dict[str, Any], d_out: Tensor, device: str, precision: str | None) -> list[Tensor]:
    """Those of gate_up_proj and down_proj, float64. call: the arguments of `moe_mlp` by name.  precision: None for float64."""
    changes, dtype = (
        ({"backend": "torch"}, torch.float64) if precision is None else ({"precision": precision}, torch.bfloat16)
    )
    weights = [call[name].detach() for name in WEIGHTS]
    leaves = [(t.double() if precision is None else t.clone()).requires_grad_() for t in weights]
    given = call | dict(zip(WEIGHTS, leaves, strict=True)) | {"options": replace(call["options"], **changes)}
    given |= {"x": call["x"].detach().bfloat16().to(dtype), "scores": call["scores"].detach().to(dtype)}
    with torch.autocast(device, torch.bfloat16, enabled=precision is not None):
        out = moe_mlp(**given)
    return [gradient.double() for gradient in torch.autograd.grad(out, leaves, d_out.bfloat16().to(dtype))]


def cosines(config: Config, device: str) -> list[Row]:
    """A row for each layer, weight and precision: the least and the mean cosine over experts that have tokens."""
    torch.manual_seed(config.seed)
    model = GPT(config).to(device)
    with torch.no_grad():
        model.head.weight.normal_(std=config.d_model**-0.5)
    text, _ = load_data(config.data, config.context)
    calls, outputs = list[dict[str, Any]](), list[Tensor]()

    def recorded(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(dict(zip(("x", *WEIGHTS, "scores", "topk_experts"), tensors, strict=True)) | options)
        outputs.append(moe_mlp(**calls[-1]))
        return outputs[-1]

    for block in model.blocks:
        block.moe._experts = recorded
    with torch.autocast(device, torch.bfloat16):
        loss = model(*Batches(text.to(device), config.context, config.batch, config.seed)[0]).loss
    rows = []
    for layer, (call, d_out) in enumerate(zip(calls, torch.autograd.grad(loss, outputs), strict=True)):
        exact = weight_gradients(call, d_out, device, None)
        for precision in ("bf16", "fp8"):
            made = weight_gradients(call, d_out, device, precision)
            for name, a, b in zip(WEIGHTS, made, exact, strict=True):
                found = cosine_similarity(a.flatten(1), b.flatten(1))[b.flatten(1).norm(dim=1) > 0]
                figures = {"experts": len(found), "least": float(found.min()), "mean": float(found.mean())}
                rows.append({"layer": layer, "weight": name, "precision": precision} | figures)
    return rows

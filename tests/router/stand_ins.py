"""The fallback in the place of the kernels: for tests of what operators do around a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from blazeproto.router import fallback, hashing, linear, losses, ops, pairs, topk

SCORE, LOSSES = ("score", "renormalize", "scale"), ("score", "balance", "z")


def play_kernels(patch: pytest.MonkeyPatch) -> set[str]:
    """Launches fill their outputs by the fallback, on any device. Returns the names of those called, which grow as they are."""
    called: set[str] = set()

    def stand_in(module: Any, name: str, compute: Callable[..., tuple[Any, Any]]) -> None:
        def launch(*arguments: Any) -> None:
            called.add(f"{module.__name__.rpartition('.')[2]}.{name}")
            given = [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments[:-2]]  # the GPU and the stream
            outputs, made = compute(*given)
            for output, result in zip(outputs, made, strict=True):
                assert output.shape == result.shape and output.dtype == result.dtype
                output.copy_(result)

        patch.setattr(module, name, launch)

    def named(names: tuple[str, ...], options: Any) -> dict[str, Any]:
        return dict(zip(names, options, strict=True))

    stand_in(
        topk,
        "launch",
        lambda logits, bias, scores, experts, options: (
            (scores, experts),
            fallback.topk_route(logits, experts.shape[1], bias=bias, **named(SCORE, options)),
        ),
    )
    stand_in(
        topk,
        "launch_backward",
        lambda *given: (given[3:4], (fallback.topk_route_backward(*given[:3], **named(SCORE, given[4])),)),
    )
    stand_in(
        losses,
        "launch",
        lambda logits, experts, outputs, workspace, options: (
            outputs,
            fallback.routing_losses(logits, experts, **named(LOSSES, options)),
        ),
    )
    stand_in(
        losses,
        "launch_backward",
        lambda *given: (
            given[4:5],
            (fallback.routing_losses_backward(*given[:4], given[5], **named(LOSSES, given[6])),),
        ),
    )
    stand_in(
        pairs,
        "launch_choice",
        lambda scores, experts, draws, out, by, options, size: (
            out,
            fallback.choose_pairs(scores, experts, by, size, len(out[0]), draws=draws),
        ),
    )
    stand_in(
        pairs,
        "launch_scores",
        lambda *given: (given[3:4], (fallback.score_pairs(*given[:3], **named(SCORE, given[4])),)),
    )
    stand_in(
        pairs,
        "launch_scores_backward",
        lambda *given: (given[4:5], (fallback.score_pairs_backward(*given[:4], **named(SCORE, given[5])),)),
    )
    stand_in(
        hashing,
        "launch",
        lambda ids, experts, num_experts, seed: (
            (experts,),
            (fallback.hash_route(ids, num_experts, experts.shape[1], seed=seed),),
        ),
    )
    stand_in(
        linear,
        "launch_finish",
        lambda products, logits, parts: ((logits,), (fallback.finish_logits(products, parts),)),
    )
    stand_in(
        linear,
        "launch_split",
        lambda d_logits, logits, split, parts: ((split,), (fallback.split_gradient(d_logits, logits, parts),)),
    )
    for module in (ops, linear):
        patch.setattr(module, "current_stream", lambda t: 0)
    patch.setattr(ops, "has_dispatch_kernels", lambda *_: True)
    return called

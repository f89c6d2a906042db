"""Twenty calls whose results are exact in fp32, so that the machine must give a GPU's bits; their hashes.

    python -m tests.lab.machine.exact_cases tests/lab/machine/exact_cases.json      # on an H200 or H100

Values are whole numbers times a power of two, small enough that no sum is rounded before it is stored.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blazeproto import dispatch, gemm, router
from blazeproto.dispatch import reference
from blazeproto.lab.target import hosted

Arrays = dict[str, Any]
NUMPY = "numpy"
"""In a device's place: arrays as `blazeproto.runtime.target.launches_on` takes them."""
T, D, N, E, K = 300, 136, 72, 5, 2


class Draw:
    """Arrays of one case, the same on every device."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def _whole(self, *size: int, most: int) -> Tensor:
        return torch.randint(-most, most + 1, size, generator=self.generator).float()

    def placed(self, values: Tensor) -> Any:
        return hosted(values) if self.device == NUMPY else values.to(self.device)

    def whole(self, *size: int, most: int = 4, scale: float = 1.0) -> Any:
        return self.placed(self._whole(*size, most=most) * scale)

    def bf16(self, *size: int, most: int = 4) -> Any:
        return self.placed(self._whole(*size, most=most).bfloat16())

    def ids(self, tokens: int, experts: int, top_k: int, elsewhere: bool = False) -> Any:
        """Distinct in a row; with ``elsewhere`` some are no expert's here."""
        further = 2 if elsewhere else 0
        keys = torch.rand(tokens, experts + further, generator=self.generator)
        return self.placed((keys.topk(top_k).indices - further // 2).int())


def lists(made: dispatch.Dispatch) -> Arrays:
    names = ("expert_pair_indices", "expert_token_offsets", "token_index_map")
    return {name: getattr(made, name) for name in names}


def build(seed: int, tokens: int, experts: int, top_k: int, method: str, elsewhere: bool, device: str) -> Arrays:
    ids = Draw(seed, device).ids(tokens, experts, top_k, elsewhere)
    made = dispatch.build_dispatch(ids, experts, method=method)
    rows = int(made.expert_token_offsets[-1])
    return lists(made) | {"expert_pair_indices": made.expert_pair_indices[:rows]}


def rows_of(draw: Draw) -> tuple[dispatch.Dispatch, int]:
    """A dispatch, whose kernels other cases are for, and its rows."""
    build = reference.build_dispatch if draw.device == NUMPY else dispatch.build_dispatch
    return build(draw.ids(T, E, K), E), T * K


def up(seed: int, activation: str, device: str) -> Arrays:
    draw = Draw(seed, device)
    halves = 2 if activation == "reglu" else 1
    h, act = gemm.up_forward(
        draw.bf16(T, D), draw.bf16(E, halves * N, D, most=1), rows_of(draw)[0], activation=activation
    )
    return {"h": h, "act": act}


def down(seed: int, bias: bool, device: str) -> Arrays:
    draw = Draw(seed, device)
    rows, count = rows_of(draw)
    added = draw.bf16(E, D) if bias else None
    return {"y": gemm.down_forward(draw.bf16(count, N), draw.bf16(E, D, N, most=1), rows, bias=added)}


def combine(seed: int, weighed: bool, device: str) -> Arrays:
    draw = Draw(seed, device)
    rows, count = rows_of(draw)
    scores = draw.whole(T, K, scale=0.25) if weighed else None
    return {"out": gemm.combine(draw.bf16(count, D), rows, scores=scores)}


def down_backward(seed: int, device: str) -> Arrays:
    draw = Draw(seed, device)
    rows, count = rows_of(draw)
    given = draw.bf16(T, D, most=2), draw.bf16(E, D, N, most=1), draw.bf16(count, N), draw.whole(T, K, scale=0.5)
    made = gemm.down_backward_act(*given, rows, activation="relu")
    return dict(zip(("dh", "a_scaled", "d_scores"), made, strict=True))


def weight(seed: int, which: str, device: str) -> Arrays:
    draw = Draw(seed, device)
    rows, count = rows_of(draw)
    if which == "down":
        return {"dw": gemm.down_backward_weight(draw.bf16(T, D, most=2), draw.bf16(count, N, most=2), rows)}
    return {"dw": gemm.up_backward_weight(draw.bf16(count, N, most=2), draw.bf16(T, D, most=2), rows)}


def rows_back(seed: int, device: str) -> Arrays:
    draw = Draw(seed, device)
    rows, count = rows_of(draw)
    return {"dx_rows": gemm.up_backward_act(draw.bf16(count, N), draw.bf16(E, N, D, most=1), rows)}


def logits(seed: int, parts: int, device: str) -> Arrays:
    draw = Draw(seed, device)
    return {"logits": router.logits_product(draw.bf16(T, D), draw.bf16(parts * E, D), parts)}


CASES: dict[str, Callable[[str], Arrays]] = {
    "dense": partial(build, 0, 40, 5, 2, "dense", False),
    "dense, elsewhere": partial(build, 1, 70, 9, 3, "dense", True),
    "tiled": partial(build, 2, 300, 8, 2, "tiled", False),
    "tiled, elsewhere": partial(build, 3, 1000, 64, 6, "tiled", True),
    "tiled, one token": partial(build, 4, 1, 8, 8, "tiled", False),
    "tiled, 128 experts": partial(build, 5, 513, 128, 8, "tiled", False),
    "relu": partial(up, 6, "relu"),
    "reglu": partial(up, 7, "reglu"),
    "relu again": partial(up, 8, "relu"),
    "down": partial(down, 9, False),
    "down, bias": partial(down, 10, True),
    "combine": partial(combine, 11, False),
    "combine, scores": partial(combine, 12, True),
    "down backward": partial(down_backward, 13),
    "down backward again": partial(down_backward, 14),
    "dW_down": partial(weight, 15, "down"),
    "dW_up": partial(weight, 16, "up"),
    "dX rows": partial(rows_back, 17),
    "logits": partial(logits, 18, 1),
    "logits, two parts": partial(logits, 19, 2),
}


def hash_of(made: Arrays) -> str:
    """SHA-256 of the results' names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, array in made.items():
        host = _tensor(array).detach().cpu().contiguous()
        found.update(f"{name} {host.dtype} {tuple(host.shape)} ".encode())
        found.update(host.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensor(array: Any) -> Tensor:
    """A NumPy array as a tensor; uint16 stands for bf16."""
    if isinstance(array, Tensor):
        return array
    made = torch.from_numpy(array.copy())
    return made.view(torch.bfloat16) if made.dtype == torch.uint16 else made


def main() -> None:
    hashes = {name: hash_of(run("cuda")) for name, run in CASES.items()}
    again = {name: hash_of(run("cuda")) for name, run in CASES.items()}
    assert hashes == again, [name for name in hashes if hashes[name] != again[name]]
    Path(sys.argv[1]).write_text(json.dumps(hashes, indent=1) + "\n")
    print(f"{len(hashes)} hashes")


if __name__ == "__main__":
    main()

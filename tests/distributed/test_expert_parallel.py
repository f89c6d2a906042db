"""`expert_parallel` on four and eight gloo ranks (ep_ranks.py); and on one: refusals, other dispatchers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ep_ranks import ANY_NUMBER, CASES, EIGHT, TOKENS, D, E, batch, build, run_rank, step
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from blazeproto.autograd import Arrived, Options
from blazeproto.blocksparse import dMoE
from blazeproto.distributed import AllToAll, Symmetric, clip_grad_norm_, expert_parallel
from blazeproto.distributed.parallel import mesh_of
from blazeproto.lab import explain
from blazeproto.lab.views import view
from tests.refusals import refuses


def test_four_ranks(tmp_path: Path) -> None:
    mp.start_processes(run_rank, args=(tmp_path, TOKENS, CASES), nprocs=len(TOKENS), start_method="spawn")


@pytest.mark.full
def test_eight_ranks(tmp_path: Path) -> None:
    """An expert on each, or two with two copies."""
    mp.start_processes(run_rank, args=(tmp_path, EIGHT, ANY_NUMBER), nprocs=len(EIGHT), start_method="spawn")


class Here:
    """A dispatcher for one rank: tokens stay."""

    def check(self, options: Options) -> None:
        self.checked = options

    def dispatch(self, *given: Any) -> Arrived:
        x, scores, *lists = given
        self.tokens = len(x)
        return Arrived(x, scores, *lists, route="stays")

    def combine(self, partial: Tensor, arrived: Arrived) -> Tensor:
        assert arrived.route == "stays"
        return partial


@pytest.mark.parametrize("made", [Tensor.float, lambda x: x[:, :8], lambda x: x.to("meta")])
def test_a_dispatcher_brings_rows_like_those_that_left(group: dist.ProcessGroup, made: Any) -> None:
    class Other(Here):
        def dispatch(self, x: Tensor, *given: Any) -> Arrived:
            return super().dispatch(made(x), *given)

    layer = expert_parallel(build(), group, dispatcher=Other())
    refuses(lambda: layer(torch.randn(6, D, dtype=torch.float64)), "dispatcher")


def test_any_dispatcher_with_the_protocol_serves(group: dist.ProcessGroup) -> None:
    here, alone = Here(), build()
    layer = expert_parallel(build(), group, dispatcher=here)
    got, expected = step(layer, 0), step(alone, 0)
    assert here.tokens == len(got["out"]) and here.checked is layer.options
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert torch.equal(layer.down_proj.grad.full_tensor(), alone.down_proj.grad)


def test_refusals(group: dist.ProcessGroup) -> None:
    layer, meta = expert_parallel(build(), group), DeviceMesh("meta", [0], _init_backend=False)
    refuses(lambda: expert_parallel(layer, group), "moe")
    refuses(lambda: expert_parallel(nn.Linear(2, 2), group), "moe", TypeError)  # type: ignore[arg-type]
    refuses(lambda: expert_parallel(dMoE(16, 128, 4, 2), group), "moe", TypeError)
    refuses(lambda: expert_parallel(build(), DeviceMesh("cpu", [[[0]]])), "mesh_or_group")
    refuses(lambda: expert_parallel(build(), meta), "mesh_or_group")
    refuses(lambda: layer.prepare(4), "prepare", RuntimeError)
    refuses(lambda: layer.saved_bytes(4), "saved_bytes", RuntimeError)
    refuses(lambda: explain(layer, batch(0)[0]), "explain", RuntimeError)
    assert "save" not in view(layer).facts
    refuses(lambda: clip_grad_norm_(layer.parameters(), -1), "max_norm")


def dispatchers_that_do_not_fit(group: dist.ProcessGroup) -> Iterator[tuple[Any, type[Exception]]]:
    room = {"max_tokens": 32, "max_pairs": 128}
    yield AllToAll(group, E // 2), ValueError
    yield Symmetric(group, 2 * E, d_model=D, **room), ValueError
    yield Symmetric(group, E, d_model=2 * D, **room), ValueError
    elsewhere = Symmetric(group, E, d_model=D, **room)
    elsewhere.device = torch.device("cuda")
    yield elsewhere, ValueError
    for other in ("all_to_all", AllToAll, 3):
        yield other, TypeError


def test_dispatchers_that_do_not_fit_are_refused_then_and_later(group: dist.ProcessGroup) -> None:
    """Where it is given, and where it is assigned later; else pairs would vanish."""
    layer, later, x = build(), expert_parallel(build(), group), batch(0)[0]
    for dispatcher, error in dispatchers_that_do_not_fit(group):
        refuses(lambda: expert_parallel(layer, group, dispatcher=dispatcher), "dispatcher", error)  # noqa: B023
        later.dispatcher = dispatcher
        refuses(lambda: later(x), "dispatcher", error)
    assert layer.dispatcher is None and type(layer.down_proj) is nn.Parameter


def test_clipping_takes_one_tensor_or_any_iterable() -> None:
    """As torch's does; what iterates over something else is refused."""
    for wrap in (lambda p: p, lambda p: [p], lambda p: (each for each in [p]), lambda p: {p}):
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.full((3,), 10.0)
        assert float(clip_grad_norm_(wrap(parameter), 1.0)) == pytest.approx(300**0.5)
        assert float(parameter.grad.norm()) == pytest.approx(1.0)
    assert float(clip_grad_norm_([], 1.0)) == 0 == float(clip_grad_norm_(nn.Parameter(torch.zeros(3)), 1.0))
    for wrong in ({"weight": parameter}, "weight", nn.Linear(2, 2)):
        refuses(lambda: clip_grad_norm_(wrong, 1.0), "parameters", TypeError)  # type: ignore[arg-type]  # noqa: B023


@pytest.mark.parametrize("option", ["row_capacity", "workspace_bytes"])
def test_bounds_are_refused_then_and_later(group: dist.ProcessGroup, option: str) -> None:
    refuses(lambda: expert_parallel(build(**{option: 4096}), group), option)
    layer = expert_parallel(build(), group)
    setattr(layer, option, 4096)
    refuses(lambda: layer(batch(0)[0]), option)


def test_no_double_backward(group: dist.ProcessGroup) -> None:
    x = batch(0)[0].requires_grad_()
    (dx,) = torch.autograd.grad(expert_parallel(build(), group)(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()


def test_a_mesh_for_a_layer_on_meta_is_of_the_group_s_device(group: dist.ProcessGroup) -> None:
    assert mesh_of(group, "meta").device_type == mesh_of(group, "cpu").device_type == "cpu"


def test_a_layer_on_meta_becomes_its_slice(group: dist.ProcessGroup) -> None:
    layer = expert_parallel(build(device="meta"), group).to_empty(device="cpu")
    assert layer.down_proj.to_local().device.type == "cpu"


def test_torch_compile_breaks_its_graph_there(group: dist.ProcessGroup) -> None:
    layer, x = expert_parallel(build(), group), batch(0)[0]
    assert torch.equal(torch.compile(layer, backend="eager")(x)[0], layer(x)[0])

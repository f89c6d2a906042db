"""A layer in graphs, on streams and in memory pools of a GPU has the bits of a plain step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from places import TOKENS, Place, Results, assert_same_bits, backward, collect, in_two_threads, plain, train
from torch import Tensor, nn

from blazeproto import MoE
from tests.gpu import Captured

pytestmark = pytest.mark.gpu

PLACES = pytest.mark.parametrize(
    "place",
    [
        pytest.param(Place("cuda", "hopper", False), id="gpu"),
        pytest.param(Place("cuda", "hopper", True), id="gpu-float32"),
        pytest.param(Place("cuda", "ampere", False), id="gpu-ampere"),
        pytest.param(Place("cuda", "ampere", True), id="gpu-ampere-float32"),
    ],
)


class Step:
    """Forward and backward of layers in a row on inputs that stay where they are, as a graph wants them."""

    def __init__(self, place: Place, layers: list[MoE]) -> None:
        self.place, self.layers = place, layers
        self.x, self.d_out = place.batch()
        self.names = ["x", *(f"{i}.{name}" for i, layer in enumerate(layers) for name, _ in layer.named_parameters())]

    def load(self, seed: int) -> None:
        """Other tokens, which go to other experts."""
        with torch.no_grad():
            for mine, other in zip((self.x, self.d_out), self.place.batch(seed), strict=True):
                mine.copy_(other)

    def __call__(self) -> Results:
        results: Results = {}
        out, losses = self.x, []
        with self.place.autocast():
            for number, layer in enumerate(self.layers):
                out, stats = layer(out)
                losses.append(stats.aux_loss)
                results |= {f"{number}.out": out, f"{number}.load": stats.load}
        inputs = [self.x, *(p for layer in self.layers for p in layer.parameters())]
        ones = [torch.ones_like(loss) for loss in losses]
        made = torch.autograd.grad([out, *losses], inputs, [self.d_out, *ones])
        return {name: t.detach() for name, t in results.items()} | dict(zip(self.names, made, strict=True))

    def expected(self, seed: int) -> Results:
        """By an eager run of copies of the inputs."""
        eager = Step(self.place, self.layers)
        eager.load(seed)
        return {name: t.clone() for name, t in eager().items()}

    def capture(self, pool: Any = None) -> Captured:
        for layer in self.layers:
            layer.prepare(TOKENS)
        return Captured(self, pool)


@PLACES
@pytest.mark.parametrize("save", ["minimal", "recompute"])
def test_a_graph_of_two_layers(place: Place, save: str) -> None:
    """Captured once; replayed with other tokens and another routing."""
    step = Step(place, [place.build(seed=1, save=save), place.build(seed=4, save=save)])
    captured = step.capture()
    for seed in (5, 6, 5):
        expected = step.expected(seed)
        step.load(seed)
        assert_same_bits(captured.replay(), expected)


@PLACES
def test_two_graphs_in_one_memory_pool(place: Place) -> None:
    """Replayed in the order of their capture, as a pool that they share demands."""
    pool = torch.cuda.graph_pool_handle()
    steps = [Step(place, [place.build(seed=1)]), Step(place, [place.build(seed=4)])]
    captured = [step.capture(pool) for step in steps]
    for seed in (5, 6):
        expected = [step.expected(seed) for step in steps]
        for step in steps:
            step.load(seed)
        for each in captured:
            each.graph.replay()
        torch.cuda.synchronize()
        for each, want in zip(captured, expected, strict=True):
            assert_same_bits(each.results, want)


@PLACES
def test_a_graph_beside_eager_steps(place: Place) -> None:
    """The layer goes on being used between replays, and its weights change."""
    layer = place.build()
    step = Step(place, [layer])
    captured = step.capture()
    for seed in (5, 6):
        with torch.no_grad():
            for p in layer.parameters():
                p.mul_(0.5)
        expected = step.expected(seed)
        step.load(seed)
        train(place, layer, *place.batch(seed + 1))
        assert_same_bits(captured.replay(), expected)


class TensorsOnly(nn.Module):
    """What make_graphed_callables takes: tensors in, tensors out."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, stats = self.layer(x)
        return out, stats.aux_loss


def test_make_graphed_callables(backend: str) -> None:
    place = Place("cuda", backend, False)
    expected = {seed: plain(place, seed) for seed in (5, 6)}
    layer = place.build()
    layer.prepare(TOKENS)
    x, _ = place.batch()
    graphed = torch.cuda.make_graphed_callables(TensorsOnly(layer), (x,))
    for seed in (5, 6, 5):
        layer.zero_grad()
        x, d_out = place.batch(seed)
        out, aux_loss = graphed(x)
        backward(out, aux_loss, d_out)
        assert_same_bits(collect(out, x, layer), expected[seed])


def allocate_and_overwrite() -> None:
    """Take the sizes that a layer's buffers have, and fill them: whoever still reads freed memory sees NaN."""
    for rows in (TOKENS, 2 * TOKENS):
        for width in (128, 256, 512):
            torch.full((rows, width), torch.nan, dtype=torch.bfloat16, device="cuda")


@PLACES
def test_a_side_stream_while_the_default_one_allocates(place: Place) -> None:
    """x comes from the default stream and is freed there; record_stream keeps it until the side stream has read it."""
    expected, layer, side = plain(place), place.build(), torch.cuda.Stream()
    for _ in range(3):
        x, d_out = place.batch()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # so that the default stream runs ahead
            results = train(place, layer, x, d_out)
        for t in (x, d_out):
            t.record_stream(side)
        del x, d_out
        for _ in range(20):
            allocate_and_overwrite()
        torch.cuda.current_stream().wait_stream(side)
        assert_same_bits(results, expected)


@PLACES
def test_forward_and_backward_on_different_streams(place: Place) -> None:
    """Autograd runs a node's backward on the stream of its forward, whichever is current then."""
    expected, layer, side = plain(place), place.build(), torch.cuda.Stream()
    x, d_out = place.batch()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        out, aux_loss = place.forward(layer, x)
    torch.cuda.current_stream().wait_stream(side)
    backward(out, aux_loss, d_out)
    assert_same_bits(collect(out, x, layer), expected)


@PLACES
def test_two_streams_at_once(place: Place) -> None:
    """Two layers at work on the GPU at the same time; neither uses memory of the other."""
    layers, streams = [place.build(seed=1), place.build(seed=4)], [torch.cuda.Stream(), torch.cuda.Stream()]
    expected = [train(place, layer, *place.batch()) for layer in layers]
    batches = [[place.batch() for _ in range(4)] for _ in layers]
    torch.cuda.synchronize()
    results: list[list[Results]] = [[], []]
    for turn in range(4):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[number].append(train(place, layers[number], *batches[number][turn]))
    torch.cuda.synchronize()
    for number, of_stream in enumerate(results):
        for got in of_stream:
            assert_same_bits(got, expected[number])


@PLACES
def test_two_threads_with_a_stream_each(place: Place) -> None:
    layers = [place.build(seed=1), place.build(seed=4)]
    expected = [train(place, layer, *place.batch()) for layer in layers]
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                got = train(place, layers[number], *place.batch())
                torch.cuda.current_stream().synchronize()
                assert_same_bits(got, expected[number])

    in_two_threads(work)


@PLACES
def test_memory_of_another_pool(place: Place) -> None:
    """All that a layer allocates comes from torch's allocator, so from the pool that is in use."""
    expected, layer = plain(place), place.build()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        results = train(place, layer, *place.batch())
    torch.cuda.synchronize()
    assert_same_bits(results, expected)


@PLACES
@pytest.mark.parametrize("free", [torch.cuda.empty_cache, allocate_and_overwrite])
def test_memory_that_is_given_back_between_forward_and_backward(place: Place, free: Callable[[], None]) -> None:
    expected, layer, (x, d_out) = plain(place), place.build(), place.batch()
    out, aux_loss = place.forward(layer, x)
    free()
    backward(out, aux_loss, d_out)
    assert_same_bits(collect(out, x, layer), expected)

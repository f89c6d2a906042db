"""Shared by the router's public functions: a statement of their arrays, and kernels that run over rows.

A function states its arrays by dtype and shape, ``"float32 T E"``; of that its check and its outputs are made. Its body is
empty: `public` calls the launch. Operators call the same kernels on tensors, without a check.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from itertools import accumulate
from typing import Any, TypeVar

from blazeproto.runtime import arrays, memory
from blazeproto.runtime.libraries import any_library
from blazeproto.runtime.numba_kernel import NumbaKernel

F = TypeVar("F", bound=Callable[..., Any])
Place = tuple[int, int]
"""A CUDA ordinal and a raw cudaStream_t."""


def place_of(tensor: Any) -> Place:
    """A tensor's GPU, and the caller's stream on it."""
    return tensor.get_device(), arrays.current_stream(tensor)


def parts_of(workspace: Any, *parts: tuple[int, str]) -> list[Any]:
    """The parts, (elements, dtype of four bytes), that lie side by side in a workspace, as kernels take them."""
    memory_of, begins = memory.argument(workspace), accumulate((4 * size for size, _ in parts), initial=0)
    return [memory.part(memory_of, begin, *part) for begin, part in zip(begins, parts, strict=False)]


class RowKernel(NumbaKernel):
    """A kernel whose blocks have ``rows`` rows each, and go on with further ones where ``most_blocks`` blocks are too few.

    rows: default: one for each of the groups of ``lanes`` threads that a block has.
    """

    def __init__(
        self, make: Callable[..., Any], parameters: str, *, most_blocks: int, rows: int = 0, **rest: Any
    ) -> None:
        super().__init__(make, parameters, **rest)
        self.rows, self.most_blocks = rows or self.threads // rest["lanes"], most_blocks

    def over(self, num_rows: int, place: Place, given: tuple[Any, ...], *numbers: int, made: Any = ()) -> Any:
        """Launch on checked arrays, views or tensors: ``given`` and, behind these, what is ``made``, which is returned.

        numbers: what the kernel takes behind them, default: ``num_rows``.
        """
        operands = (*given, *made) if isinstance(made, tuple) else (*given, made)
        blocks = min(-(-num_rows // self.rows), self.most_blocks)
        if blocks:
            pointers = [memory.argument(operand) for operand in operands]
            if arrays.simulated():  # where a pointer's type is the array's
                pointers = [array.view(word[:-1]) for array, word in zip(pointers, self.parameters, strict=False)]
            self.launch(*place, blocks, 0, *pointers, *(numbers or (num_rows,)))
        return made


def public(
    takes: Mapping[str, str],
    makes: Mapping[str, str],
    check: Callable[[dict[str, Any], dict[str, Any]], None],
    launch: Callable[..., None],
    writes: tuple[str, ...] = (),
    alignment: int = 0,
    simulated: bool = True,
) -> Callable[[F], F]:
    """Decorates the signature and docstring of a public function of arrays of any library; its twin is in `fallback`.

    takes, makes: inputs and outputs. A dtype, two of them as ``float32|bfloat16``, or ``logits`` for the logits' dtype; then
    a word for each dimension, which the first array that has it decides. An input that may be None is not looked at then.
    check: ``check(sizes, call)``: refuses what else does not fit; sizes by words, to which it may add, call by parameters.
    launch: ``launch(place, call, *inputs, *outputs)``, call with the sizes; behind these a ``workspace`` that the call may have.
    writes: inputs that are written to.  alignment: of every array at least, in bytes.
    simulated: whether Numba's simulator runs the kernels.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        def examine(**call: Any) -> tuple[list[Any], dict[str, Any]]:
            """Views of the inputs, and the sizes."""
            views: list[Any] = []
            sizes: dict[str, Any] = {}
            for name, stated in takes.items():
                dtypes, *words = stated.split()
                if call[name] is None and signature.parameters[name].default is None:
                    views.append(None)
                    continue
                kinds, shape = tuple(dtypes.split("|")), tuple(map(sizes.get, words))
                device, aligned = views[0].device if views else None, min(arrays.ITEM_BYTES[kind] for kind in kinds)
                if getattr(call[name], "device", None) == arrays.NO_DEVICE:
                    kinds += ("float32",) if "bfloat16" in kinds else ()  # which float32 stands for there
                else:
                    aligned = max(aligned, alignment)
                views.append(arrays.expect(name, call[name], kinds, shape, device=device, alignment=aligned))
                sizes.update(zip(words, views[-1].shape, strict=True))
                sizes["T+1"] = sizes.get("T", 0) + 1
            check(sizes, call)
            return views, {**call, **sizes}

        @wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            call = bound.arguments
            views, sizes = examine(**call)
            first, several = views[0], len(makes) > 1
            given = (sizes["out"] or [None] * len(makes)) if several else [sizes["out"]]

            def output(name: str, array: Any, stated: str) -> tuple[Any, Any]:
                dtype, *words = stated.split()
                dtype, aligned = (first.dtype, arrays.ITEM_BYTES[first.dtype]) if dtype == "logits" else (dtype, 4)
                return arrays.output(
                    name, array, dtype, tuple(sizes[word] for word in words), first, max(aligned, alignment)
                )

            with memory.on_stream(first, sizes["stream"]) as stream:
                made = [
                    output(f"out[{i}] ({name})" if several else "out", given[i], stated)
                    for i, (name, stated) in enumerate(makes.items())
                ]
                results = tuple(array for array, _ in made)
                if "workspace" in call:
                    made.append(output("workspace", call["workspace"], "float32 workspace"))
                launch((first.device, stream), sizes, *views, *(view for _, view in made))
            return results if several else results[0]

        examine.__signature__ = signature  # type: ignore[attr-defined]
        dtypes = {name: stated.split()[0].replace("logits", "bfloat16") for name, stated in makes.items()}
        in_host_memory = any_library(
            "blazeproto.router.fallback", dtypes, writes=writes, check=examine, simulated=simulated
        )
        return in_host_memory(run)  # type: ignore[return-value]

    return decorate

"""The package's modules executed again, in a process of its own: each by importlib.reload, then all anew after a purge.

python reloading.py COPY        a folder with a copy of the package, one of whose operators this edits
"""

import importlib
import sys
from pathlib import Path
from typing import Any

COPY = Path(sys.argv[1])
sys.path.insert(0, str(COPY))


def modules() -> list[str]:
    """The package's modules that are imported; each comes behind what it imports."""
    names, done = {name for name in sys.modules if name.partition(".")[0] == "blazeproto"}, list[str]()

    def add(name: str) -> None:
        if name in done or name not in names:
            return
        names.discard(name)
        for value in vars(sys.modules[name]).values():
            add(getattr(value, "__module__", None) or getattr(value, "__name__", ""))
        done.append(name)

    for name in sorted(names):
        add(name)
    return done


def step() -> Any:
    """Output, gradients and counted operations of a layer made now, whose weights are the same each time."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from blazeproto import MoE

    torch.manual_seed(0)
    layer, x = MoE(16, 8, 4, 2), torch.randn(5, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out, stats = layer(x)
        (out.sum() + stats.aux_loss).backward()
    return [out, x.grad, *(parameter.grad for parameter in layer.parameters())], counter.get_total_flops()


def check(what: str, expected: Any) -> None:
    import torch

    tensors, flops = step()
    assert all(map(torch.equal, tensors, expected[0])) and flops == expected[1] > 0, what


def main() -> None:
    import blazeproto

    assert Path(blazeproto.__file__).is_relative_to(COPY)
    expected = step()
    for name in modules():
        importlib.reload(sys.modules[name])
    check("every module reloaded", expected)
    reloaded = importlib.reload(sys.modules["blazeproto.autograd.options"])
    check("options alone reloaded", expected)
    blazeproto.MoE(16, 8, 4, 2).options = reloaded.Options()

    from blazeproto.autograd import chunks
    from blazeproto.router import linear

    for module, function in (
        (chunks, "def dispatch("),
        (linear, "def router_logits("),
    ):  # one is held by name elsewhere
        path = Path(str(module.__file__))
        head, _, rest = path.read_text().partition(function)
        signature, _, body = rest.partition('"""')
        doc, _, body = body.partition('"""\n')
        path.write_text(f'{head}{function}{signature}"""{doc}"""\n    MARK.append(1)\n{body}\nMARK = []\n')
        importlib.reload(module)
        check(f"{module.__name__} edited", expected)
        assert module.MARK, f"{module.__name__}: the old operator ran"

    for name in modules():
        del sys.modules[name]
    check("imported anew", expected)


main()

"""The recipes that ``precision=`` names: which products have fp8 operands, their element types, and which values share a scale.

`Options` takes the recipes of this table, and docs/fp8.md prints it. The backends read from it which values share a scale; the
kernels are written for it (`blazeproto.autograd.hopper_backend`). "fp8_rollout" is what vLLM computes with (docs/rollout.md).
"""

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from blazeproto.gemm.tiles import BF16, ELEMENTS, Element

PRODUCTS = ("up", "down", "dH", "dX", "dW_down", "dW_up")


class Operand(NamedTuple):
    """The element type, "e4m3"; what shares a scale: "token", "1x128" (128 columns of a row), "token 1x128" (of a token) or
    "128x128"; and the values that a scale has, "power_of_two" or "float32" (e4m3.py)."""

    element: str
    scale: str
    scale_values: str = "power_of_two"


TOKEN, ROW, BLOCKS = (Operand("e4m3", scale) for scale in ("token", "1x128", "128x128"))


@dataclass(frozen=True)
class Recipe:
    """The operands of an expert MLP's products. ``precision=`` takes one that is in `RECIPES`, or its name, and refuses others.

    x, d_out: tokens.  x_of_dw: x again, for dW_up.  weights: both of them.  h, act, dh, a_scaled: rows in expert order
    (a_scaled: A').  of_dw: what dW's products read, transposed.
    products: those whose operands are quantized, `PRODUCTS` or none; of the others they have x's own dtype.
    """

    x: Operand = field(default=TOKEN, metadata={"shape": "(T, d)", "when": "in forward"})
    x_of_dw: Operand = field(default=TOKEN, metadata={"shape": "(T, d)", "when": "in backward, before dW_up"})
    d_out: Operand = field(
        default=TOKEN, metadata={"shape": "(T, d)", "when": "in backward, once for dH and once for dW_down"}
    )
    weights: Operand = field(
        default=BLOCKS,
        metadata={"shape": "(E, m, k)", "when": "in forward, in both orders, or each order before its product"},
    )
    h: Operand = field(default=ROW, metadata={"shape": "(R, 2n)", "when": "in up's epilogue"})
    act: Operand = field(default=ROW, metadata={"shape": "(R, n)", "when": "in up's epilogue"})
    dh: Operand = field(default=ROW, metadata={"shape": "(R, 2n)", "when": "in down backward's epilogue"})
    a_scaled: Operand = field(default=ROW, metadata={"shape": "(R, n)", "when": "in down backward's epilogue"})
    of_dw: Operand = field(
        default=BLOCKS,
        metadata={"shape": "transposes of dH, A', x, dO", "when": "quantized values, scaled anew before dW"},
    )
    products: tuple[str, ...] = PRODUCTS

    @property
    def element(self) -> Element:
        """That of the operands by rows."""
        return ELEMENTS[self.x.element] if self.products else BF16

    def __str__(self) -> str:
        return ", ".join(
            f"{each.name} {' '.join(getattr(self, each.name)[1:])}" for each in fields(self) if each.metadata
        )

    @property
    def floats(self) -> bool:
        """Whether forward's scales are float32."""
        return self.x.scale_values == "float32"

    def operand(self, name: str) -> Operand | None:
        """The operand that a product's array is, by its name there; None for an array that stays bf16."""
        found = getattr(self, "weights" if name in ("up_proj", "down_proj") else name, None) if self.products else None
        return found if isinstance(found, Operand) else None


RECIPES = {
    "bf16": Recipe(products=()),
    "fp8": Recipe(),
    "fp8_rollout": Recipe(
        x=Operand("e4m3", "token 1x128", "float32"),
        weights=Operand("e4m3", "128x128", "float32"),
        act=Operand("e4m3", "1x128", "float32"),
    ),
}
FP8, ROLLOUT = RECIPES["fp8"], RECIPES["fp8_rollout"]


def name_of(precision: Any) -> str:
    """The name of a recipe; of a name, itself. ValueError for what can't run: the argument or its field, what was expected, what
    came."""
    is_one = isinstance(precision, str | Recipe)  # an array is equal to none
    names = [name for name, recipe in RECIPES.items() if is_one and precision in (name, recipe)]
    if names:
        return names[0]
    if type(precision) is not Recipe:
        raise ValueError(f"precision: expected one of {', '.join(map(repr, RECIPES))} or a Recipe, got {precision!r}")
    names = [each.name for each in fields(Recipe)]
    differing = ([n for n in names if getattr(precision, n) != getattr(recipe, n)] for recipe in (FP8, ROLLOUT))
    (differs, *_), nearest = min(zip(differing, (FP8, ROLLOUT), strict=True), key=lambda each: len(each[0]))
    raise ValueError(f"precision.{differs}: expected {getattr(nearest, differs)}, got {getattr(precision, differs)!r}")

"""The approximate functions of PTX ISA 9.0: how far from the exact value the hardware may be, and the machine with it."""

from typing import NamedTuple


class Bound(NamedTuple):
    """|result - exact| is at most the larger of ``relative`` * |exact| and ``absolute``."""

    relative: float
    absolute: float = 0.0


# What the ISA allows the hardware, in whose place stands the exact value, rounded. sin and cos: between -2 pi and 2 pi.
BOUNDS = {
    "div.approx": Bound(2**-22),  # 9.7.3.8, 2 ulp, for a divisor of 2^-126 to 2^126
    "div.full": Bound(2**-22),  # 9.7.3.8, 2 ulp
    "rcp.approx": Bound(2**-23),  # 9.7.3.13, 1 ulp
    "sqrt.approx": Bound(2**-23),  # 9.7.3.15
    "rsqrt.approx": Bound(2**-22.9),  # 9.7.3.16
    "sin.approx": Bound(0, 2**-20.5),  # 9.7.3.18
    "cos.approx": Bound(0, 2**-20.5),  # 9.7.3.19
    "lg2.approx": Bound(2**-22, 2**-22),  # 9.7.3.20
    "ex2.approx": Bound(2**-22),  # 9.7.3.21, 2 ulp
    "tanh.approx": Bound(2**-11),  # 9.7.3.22
}
APPROXIMATE = {f"{name}{ftz}.f32": bound for name, bound in BOUNDS.items() for ftz in ("", ".ftz")}

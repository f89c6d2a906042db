"""Pointee types of a kernel's pointers, as its CUDA C++ source declares them; PTX has addresses alone."""

import re
from typing import NamedTuple

import numpy as np


class Pointee(NamedTuple):
    """size: in bytes.  kinds: of NumPy's dtypes that hold such numbers, "u" for their bits. uint8 holds anything's bytes."""

    name: str
    size: int
    kinds: str

    def holds(self, dtype: np.dtype) -> bool:
        return (dtype.itemsize == self.size and dtype.kind in self.kinds) or dtype == np.uint8

    def __str__(self) -> str:
        return f"{self.name}, {self.size} bytes each" + f" (or their bits, uint{8 * self.size})" * (
            "i" not in self.kinds
        )


_INTEGERS = {
    "bool": 1,
    "char": 1,
    "short": 2,
    "int": 4,
    "long long": 8,
    "int8_t": 1,
    "int16_t": 2,
    "int32_t": 4,
    "int64_t": 8,
}
_FLOATS = {"float": 4, "double": 8, "half": 2, "__half": 2, "nv_bfloat16": 2, "__nv_bfloat16": 2}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r"__global__(?:[^;{}()]|\([^()]*\))*?\b(\w+)\s*\(([^()]*)\)\s*\{")
_ALIAS = re.compile(r"\btypedef\s+([\w\s]+?)\s+(\w+)\s*;|\busing\s+(\w+)\s*=\s*([\w\s]+?)\s*;")
_NO_PART = {"const", "volatile", "__restrict__", "__restrict", "signed", "std"}


def elements(source: str, entry: str) -> list[Pointee | None]:
    """The type that each parameter of this entry's kernel points to. None for no pointer, and for a type unknown here;
    an empty result if the text does not show the parameters, as for a template."""
    source = _COMMENT.sub(" ", source)
    found = [
        takes for name, takes in _KERNEL.findall(source) if entry == name or entry.startswith(f"_Z{len(name)}{name}")
    ]
    aliases = {new or newer: of or older for of, new, newer, older in _ALIAS.findall(source)}
    if len(found) != 1 or "<" in found[0]:
        return []
    return [_element(parameter, aliases) for parameter in found[0].split(",")]


def _element(parameter: str, aliases: dict[str, str]) -> Pointee | None:
    of, star, name = parameter.partition("*")
    if not star or "*" in name:
        return None
    for _ in range(1 + len(aliases)):  # of aliases too
        of = " ".join(aliases.get(word, word) for word in re.findall(r"\w+", of) if word not in _NO_PART)
    said, words = of, [word for word in of.split() if word != "unsigned"]
    plain = " ".join(word for word in words if word != "int") or "int"
    if plain in _FLOATS:  # NumPy has no bf16: ml_dtypes' is of kind V
        return Pointee(said, _FLOATS[plain], "Vu" if "bfloat16" in plain else "fu")
    size = _INTEGERS.get(plain.removeprefix("u") if plain.endswith("_t") else plain)
    return Pointee(said, size, "iub" if size == 1 else "iu") if size else None

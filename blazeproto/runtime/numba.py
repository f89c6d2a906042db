"""Numba's names, for the files of kernels. Importing this checks that numba-cuda is here, in a version that we take."""

from blazeproto.runtime.optional import need

need("numba-cuda")

from numba import cuda, float32, float64, int32, int64, types, uint16, uint32, uint64  # noqa: E402

__all__ = ["cuda", "float32", "float64", "int32", "int64", "types", "uint16", "uint32", "uint64"]

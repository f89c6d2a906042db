"""Numba's names, for the files of kernels. Importing this checks that numba-cuda is here, in a version that we take."""

import numpy

from blazeproto.runtime.optional import need

need("numba-cuda")
# NumPy 2.5 removed it, and numba-cuda 0.30 reads it when it compiles its first kernel.
vars(numpy).setdefault("row_stack", numpy.vstack)

from numba import cuda, float32, float64, int32, int64, types, uint16, uint32, uint64  # noqa: E402

__all__ = ["cuda", "float32", "float64", "int32", "int64", "types", "uint16", "uint32", "uint64"]

"""Runs the programs of ptxsim/tests/ptx_programs.py on a GPU, for ptxsim's test to compare with:

python -m tests.lab.machine.record_ptx_programs ptxsim/tests/ptx_programs.npz      # on an H200 or H100
"""

import ctypes
import sys
from pathlib import Path

import numpy as np

from ptxsim.tests.ptx_programs import TOTAL, digest_of_inputs, empty_output, programs


def main() -> None:
    """All are tried, so that one run on a GPU tells of all."""
    import cupy

    from blazeproto.gemm import launch
    from blazeproto.runtime import driver

    made, failed = {"inputs": np.array(digest_of_inputs())}, 0
    arguments = driver.ArgumentBuffer()
    pointers = (ctypes.c_uint64 * 3)(arguments.address, arguments.address + 8, arguments.address + 64)
    for index, program in enumerate(programs()):
        data, out = cupy.asarray(program.data), cupy.asarray(empty_output(program))
        arguments.bytes[:16] = np.array([data.data.ptr, out.data.ptr], np.uint64).tobytes()
        if (of := program.map) is not None:
            at = data.data.ptr if of.array == "in" else out.data.ptr
            box = launch.Box(of.shape, of.strides, of.box)
            encode, _ = launch._tensor_maps()
            launch._tensor_map_call(encode, arguments.address + 64, *launch._description(box, at))
        try:
            function = driver.load(program.text.encode(), "program", 0, program.shared_bytes)
            sizes = (program.cluster, 1, 1, program.threads, 1, 1, program.shared_bytes)
            cupy.cuda.driver.launchKernel(function.ptr, *sizes, 0, ctypes.addressof(pointers), 0)
            cupy.cuda.runtime.deviceSynchronize()
        except (RuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            failed += 1
            print(f"{program.name}: {error}", flush=True)
            continue
        made[str(index)] = cupy.asnumpy(out)[: program.out_bytes]
    np.savez_compressed(Path(sys.argv[1]), **made)
    print(f"{len(made) - 1} of {TOTAL} programs, {failed} failed; {Path(sys.argv[1]).stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()

"""The base of every folder with kernels.

No torch in here, and Numba in `numba` and `warp` alone.

    arrays          views of device arrays, checks of them, streams
    libraries       the public edge: arrays of any library, twins for those in host memory
    rounding        numbers rounded to bf16 and e4m3 in NumPy
    memory          a view as a kernel's argument, as a CuPy array; a stream made current
    checks          of options
    arch            the architectures of GPUs that kernels are written for
    driver          cubins loaded, kernels launched by addresses
    target          launches that go elsewhere than to the driver
    cache           compiled kernels, kept in a folder
    optional        packages that only the kernels need, and their versions
    moved           old modules' names, which warn
    shown           objects that IPython, Jupyter and rich show as tables
    numba           Numba's names, once its version is checked
    numba_kernel    a Numba kernel, compiled once
    warp            what the threads of a block do together, in Numba kernels
"""

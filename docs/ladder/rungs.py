"""The kernels of the ladder, by name, from the naive one on."""

from blazeproto.lab.ladder import Rung

RUNGS = {
    rung.entry: rung
    for rung in (
        Rung("1-threads.cu", "threads", tile=(16, 16), threads=256, sizes=(32, 32, 32)),
        Rung("1-threads.cu", "tiles", tile=(64, 64), threads=256, sizes=(128, 64, 64)),
        Rung("2-tensor-cores.cu", "tensor_cores", tile=(128, 128), threads=256, sizes=(128, 256, 128)),
        Rung("3-ring.cu", "ring", tile=(128, 128), threads=256, sizes=(128, 256, 320), smem=3 * 32 * 1024),
    )
}

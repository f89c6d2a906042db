"""Which tiles up_forward and down_backward_act take: those that were fastest in a layer near to theirs, on an H200.

Written by `python -m scripts.bench.tuning` from results/h200/tune.json, which `python -m scripts.bench.products --tune` makes.
"""

# (rows of an expert in the mean, d, n): what of a product's plain tiles (`tiles.PLAIN`) is changed.
# fmt: off
MEASURED: dict[tuple[float, int, int], dict[str, dict[str, int]]] = {
    (64.0, 768, 256): {"up_forward": {"tile_n": 128, "few_rows": True}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (256.0, 768, 256): {"up_forward": {"few_rows": True}, "down_backward_act": {}},
    (1536.0, 1536, 256): {"up_forward": {}, "down_backward_act": {"few_rows": True}},
    (80.0, 2048, 512): {"up_forward": {}, "down_backward_act": {}},
    (320.0, 2048, 512): {"up_forward": {"few_rows": True}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (0.0625, 2048, 768): {"up_forward": {"tile_n": 128, "few_rows": True}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (1.0, 2048, 768): {"up_forward": {"few_rows": True}, "down_backward_act": {"few_rows": True}},
    (8.0, 2048, 768): {"up_forward": {"few_rows": True}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (64.0, 2048, 768): {"up_forward": {"few_rows": True}, "down_backward_act": {"few_rows": True}},
    (128.0, 2048, 768): {"up_forward": {"few_rows": True}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (256.0, 2048, 768): {"up_forward": {"few_rows": True}, "down_backward_act": {"few_rows": True}},
    (512.0, 2048, 768): {"up_forward": {"few_rows": True}, "down_backward_act": {"few_rows": True}},
    (768.0, 2048, 768): {"up_forward": {"few_rows": True}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (1024.0, 2048, 768): {"up_forward": {"few_rows": True}, "down_backward_act": {"few_rows": True}},
    (128.0, 2880, 2880): {"up_forward": {"few_rows": True}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (512.0, 2880, 2880): {"up_forward": {"few_rows": True}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (128.0, 4096, 1024): {"up_forward": {"few_rows": True}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (384.0, 4096, 1024): {"up_forward": {"few_rows": True}, "down_backward_act": {"few_rows": True}},
    (2048.0, 4096, 1024): {"up_forward": {"tickets": True}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (128.0, 4096, 1536): {"up_forward": {"few_rows": True}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (192.0, 4096, 1536): {"up_forward": {"few_rows": True}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (256.0, 4096, 1536): {"up_forward": {"few_rows": True}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (288.0, 4096, 1536): {"up_forward": {"few_rows": True}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (512.0, 4096, 1536): {"up_forward": {"few_rows": True}, "down_backward_act": {"few_rows": True}},
    (64.0, 4096, 14336): {"up_forward": {"few_rows": True}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (512.0, 4096, 14336): {"up_forward": {"few_rows": True}, "down_backward_act": {"few_rows": True}},
    (4096.0, 4096, 14336): {"up_forward": {}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (153.6, 5120, 1536): {"up_forward": {"few_rows": True}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (614.4, 5120, 1536): {"up_forward": {}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (204.8, 6144, 2560): {"up_forward": {"few_rows": True}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (409.6, 6144, 2560): {"up_forward": {}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (32.0, 7168, 2048): {"up_forward": {"tickets": True}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (128.0, 7168, 2048): {"up_forward": {"few_rows": True}, "down_backward_act": {"few_rows": True}},
    (170.6667, 7168, 2048): {"up_forward": {}, "down_backward_act": {"cluster": 2, "few_rows": True}},
    (341.3333, 7168, 2048): {"up_forward": {}, "down_backward_act": {"tickets": True, "few_rows": True}},
    (512.0, 7168, 2048): {"up_forward": {}, "down_backward_act": {"cluster": 2, "few_rows": True}},
}

"""MoE layers of models that people know, by name, and MegaBlocks' questions to a layer: `python -m scripts.bench.models`."""

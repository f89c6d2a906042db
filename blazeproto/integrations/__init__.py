"""blazeproto in the programs that people already use, each of which has its module; `gates` has the activations of
transformers' experts.

    from blazeproto.integrations.transformers import register
    python -m torchtitan.train ... --override.imports blazeproto.integrations.torchtitan.experts

A program is imported where it is first needed: torchtitan by its module, which torchtitan itself imports.
"""

"""The MoEBlaze and SonicMoE papers' tables and figures, measured here beside what they print: `python -m scripts.bench.paper`."""

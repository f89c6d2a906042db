"""A byte-level language model with expert layers, the folder of a run, and comparisons of runs."""

"""Programs around the package, run from the repository's root: `python -m scripts.train_lm`. Not installed with it."""

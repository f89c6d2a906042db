"""The lab: oracles and measures of accuracy, for tests and for people who change kernels."""

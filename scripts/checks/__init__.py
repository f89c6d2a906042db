"""Checks on a GPU: everything in one command, random layers against the oracle, and what compute-sanitizer watches."""

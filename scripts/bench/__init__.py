"""Benchmarks: the layer, its products, the dispatch and the router, and the page of their results."""

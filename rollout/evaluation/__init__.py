"""Evaluates models on benchmarks and on your own questions, and computes the figures.

`run.evaluate` is the entry point. It loads a split (`benchmarks`), plays the episodes (`play`,
`split`) and writes a folder (`folder`, `summary`). A training run evaluates with `play` and
`figures` alone.
"""

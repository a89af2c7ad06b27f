"""Evaluates models on benchmarks and on your own questions, and computes the figures.

`run.evaluate` is the entry point. It loads a split (`benchmarks`), plays the episodes (`play`,
`split`) and writes a folder (`folder`, `summary`). `paravt_extras.compare`
reads finished folders. A training run evaluates with `play` and `figures` alone.
"""

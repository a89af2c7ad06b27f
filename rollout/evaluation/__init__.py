"""Evaluates models on benchmarks, computes the figures, and compares runs.

`run.evaluate` is the entry point. It loads a split (`benchmarks`), asks in the words of a prompt
pack (`packs`), plays the episodes (`play`, `split`) and writes a folder (`folder`, `summary`).
`compare` and `table` read finished folders.

By default, limits on turns and calls are those of the paper's released code; frame sizes, prompts
and times before frames are this project's own. Such scores cannot be compared with the paper's.
`--protocol published` asks and shows frames as the release's evaluator does.
"""

"""Evaluates models on benchmarks, computes the figures, and compares runs.

The limits on frames, turns and calls are those of the paper's released code. Frame sizes, prompts
and the placement of timestamps are this project's own, so scores differ from the paper's.
"""

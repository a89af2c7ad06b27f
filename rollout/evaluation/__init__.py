"""Evaluates models on benchmarks, computes the figures, and compares runs.

The limits on frames, turns and calls are those of the paper's released code. Frame sizes, prompts
and timestamps are this project's own, so scores cannot be compared directly with the paper's.
"""

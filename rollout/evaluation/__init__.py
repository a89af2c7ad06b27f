"""Evaluation of a model on a benchmark: the run, its files, its figures, and comparisons of runs.

Counts of frames, turns and calls follow the release. Frame size, prompts and the order of times are
this project's own.
"""

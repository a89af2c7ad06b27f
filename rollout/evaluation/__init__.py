"""A model on a benchmark's split: the run, its files, its numbers, and two runs side by side.

Counts of frames, turns and calls follow the release; frame size, prompts and the order of times are
this project's own.
"""

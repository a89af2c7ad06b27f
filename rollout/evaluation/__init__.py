"""A model on a published split: the run, its files, its numbers, and two runs side by side."""

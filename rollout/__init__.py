"""Sampling: the engine, the episode that uses it, and evaluation."""

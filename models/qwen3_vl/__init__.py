"""Qwen3-VL: configuration, model, positions, generation, and reading and writing of weights."""

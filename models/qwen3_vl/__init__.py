"""Qwen3-VL: configuration, model, positions, generation, and weights in and out."""

"""Qwen2.5-VL in Flax NNX (arXiv 2502.13923)."""

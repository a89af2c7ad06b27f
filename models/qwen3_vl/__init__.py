"""Qwen3-VL in Flax NNX (arXiv 2511.21631)."""

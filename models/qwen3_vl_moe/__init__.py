"""Qwen3-VL with a mixture of experts (arXiv 2511.21631)."""

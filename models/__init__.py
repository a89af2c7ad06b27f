"""Models: Qwen3-VL in Flax NNX with its processor and weights, attention kernels, and sharding."""

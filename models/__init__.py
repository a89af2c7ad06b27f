"""Models: families of vision-language models in Flax NNX, attention kernels, weights, sharding."""

"""Plans a run on a TPU slice without the slice: memory, FLOPs, traffic and time."""

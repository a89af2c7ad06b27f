"""What a run needs on a TPU slice: memory, FLOPs, traffic and time, without having the slice."""

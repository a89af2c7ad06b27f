"""What a run needs on a TPU slice: memory, FLOPs, traffic and time, compiled without the slice. Run `python -m train.plan`."""

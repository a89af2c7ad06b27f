"""What a run would need on a TPU that this machine lacks: chips, counters, programs, and sums over them. The command is `train.plan`."""

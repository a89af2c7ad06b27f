"""Interrupting and resuming a run: phases, checkpoints, run directories, hosts and metrics."""

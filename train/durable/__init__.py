"""What lets a run end at any moment and go on: phases, checkpoints, run directories, hosts, metrics."""

"""Training: cold start, PARA-GRPO, checkpoints, metrics, report."""

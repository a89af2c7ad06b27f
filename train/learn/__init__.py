"""Learning: batches, SFT, PARA-GRPO, the jitted update, and weights into the engine."""

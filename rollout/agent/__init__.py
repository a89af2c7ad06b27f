"""The agent: an episode from the question to the answer, its tools, and remote samplers."""

"""The method: prompts, parsing, struct(o), rewards and PARA-GRPO. Pure code without a model."""

"""The method: records, prompts, parsing, struct(o), rewards and PARA-GRPO. Pure functions: no files, no model."""

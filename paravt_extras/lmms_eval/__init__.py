"""lmms-eval, from both sides.

`worker` and `client` ask an installed lmms-eval for prompts and scores (`--protocol lmms-eval`).
`plugin`, `model` and `serve` offer this project's agent to lmms-eval as the model `paravt_jax`.
Both cross from one Python environment to another, with JSON lines over pipes (`pipe`).
"""

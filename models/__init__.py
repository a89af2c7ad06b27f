"""Models: Qwen3-VL in Flax NNX, its frame processor, its weights in and out, and how parameters are laid over a mesh.

Owns everything between token ids and hidden states. Imports at most `paravt_jax`.
"""

"""ParaVT in JAX: the method, its data and the small world, without models or trainers.

docs/reference.md collects what the paper, its release and its data say.
"""

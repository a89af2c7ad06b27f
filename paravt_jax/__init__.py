"""ParaVT in JAX: the method, its data and the small world, without models or trainers.

"REFERENCE 3" in a docstring is section 3 of docs/reference.md, which collects what the paper, its
release and its data say.
"""

"""ParaVT in JAX: the method, its data and the small world, without models or trainers."""

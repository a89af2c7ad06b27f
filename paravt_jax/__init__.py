"""ParaVT in JAX: the method itself, free of models, engines and trainers."""

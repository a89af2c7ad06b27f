"""Weights on disk, for any model: Hugging Face folders (`folder`), safetensors (`tensor_file`)."""

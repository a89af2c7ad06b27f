"""Weights on disk, of any model: folders in the Hugging Face layout (`folder`) and the safetensors format (`tensor_file`)."""

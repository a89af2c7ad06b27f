"""The sampler: requests in, tokens and their log-probs out."""

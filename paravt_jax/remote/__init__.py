"""A judge behind an OpenAI-compatible server, and its client."""

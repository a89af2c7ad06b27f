"""The tools a main agent may call, one per file."""

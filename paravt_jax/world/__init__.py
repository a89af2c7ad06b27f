"""The small world of the embedded run: its videos, its words, its conversations."""

"""The small world of the embedded run: its videos, its texts and its vocabulary."""

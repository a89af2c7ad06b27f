"""Reads files into questions, conversations and frames."""

"""Episodes as HTML."""

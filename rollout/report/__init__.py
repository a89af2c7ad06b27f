"""Episodes as HTML pages."""

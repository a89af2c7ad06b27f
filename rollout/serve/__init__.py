"""HTTP servers of this project: what they share."""

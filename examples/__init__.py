"""Programs to read: each uses the library as one's own code would."""

"""Commands that measure and stress this project. Run them from a checkout."""

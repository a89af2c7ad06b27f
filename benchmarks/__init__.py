"""Commands that measure this project and try to break it. Run them from a checkout."""

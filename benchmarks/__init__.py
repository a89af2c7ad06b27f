"""Commands that measure this project and try to break it. They are run from a checkout and are not installed."""

"""The processes of a command that runs on several hosts: connecting them and exchanging values."""

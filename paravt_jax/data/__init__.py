"""From files to questions, conversations and frames."""

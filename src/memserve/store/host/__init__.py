"""A store's process: its memory, files and threads."""

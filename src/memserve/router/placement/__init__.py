"""Which instances have how much of a prompt, and which are chosen."""

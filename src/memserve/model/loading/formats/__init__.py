"""Checkpoints of Hugging Face folders whose weights are quantised: what lies in their files, and what it means."""

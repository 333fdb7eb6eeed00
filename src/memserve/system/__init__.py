"""This process and its machine: signals, memory, secrets, GPUs, the thread of a machine."""

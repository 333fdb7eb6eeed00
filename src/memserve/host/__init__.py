"""Processes and threads: what runs the machines, and performs what they ask for."""

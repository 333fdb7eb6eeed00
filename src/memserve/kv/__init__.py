"""Blocks, prefixes, tiers, and what moving or computing them costs."""

"""Recurrent states: which layers have one, where those of slots lie, and how a ragged step computes with them."""

"""Evaluations of papers, repeated with the production machines under virtual time."""

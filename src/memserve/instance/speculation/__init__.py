"""Drafted tokens: which, how many pay, and the rows that compute them."""

"""A step plan to tokens: weights, attention, sampling."""

"""Bytes and Python calls to requests, tokens to streams."""

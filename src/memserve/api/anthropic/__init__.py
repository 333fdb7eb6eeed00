"""Anthropic's Messages API: bodies, answers, endpoints."""

"""Tokens to the bytes of an answer: text, reasoning, tool calls, formats, replays."""

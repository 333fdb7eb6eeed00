"""Gateways of others that ask where a request goes: the protocol, a request of theirs, the server."""

"""Gateways that ask over Envoy's external processing where a request of a fleet shall go."""

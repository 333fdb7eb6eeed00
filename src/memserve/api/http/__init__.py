"""The HTTP/1.1 server: a library inside, bounded in all that a client can make it hold."""

"""Engines of other projects behind the router: which of them gets a request, and what they have cached."""

"""Serving tokens: the engine protocol, the request service, swaps, routing."""

"""Sharded collections and the sharders that make them."""

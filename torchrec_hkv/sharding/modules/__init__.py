"""Sharded collections and their sharders."""

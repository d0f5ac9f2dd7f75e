"""Interfaces for users of other libraries."""

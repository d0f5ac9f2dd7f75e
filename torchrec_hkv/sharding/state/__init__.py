"""The ``state_dict`` of sharded tables, and loading it on other ranks."""

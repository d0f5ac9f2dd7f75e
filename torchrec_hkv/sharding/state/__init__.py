"""The ``state_dict`` of sharded tables, and its redistribution to other ranks."""

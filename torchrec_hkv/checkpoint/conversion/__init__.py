"""Tables of other programs as checkpoints of this one, and back."""

"""What users of other libraries know from there."""

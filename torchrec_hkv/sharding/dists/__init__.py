"""The exchange between ranks in a step: input distribution of ids and scores, output distribution
of rows."""

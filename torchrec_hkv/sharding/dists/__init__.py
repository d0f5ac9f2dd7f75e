"""What ranks exchange in a step: ids and scores on their way in, rows on their way out."""

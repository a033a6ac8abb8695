"""From token ids to micro-batches."""

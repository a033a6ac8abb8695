"""From text to token ids on disk."""

"""What checkpoints and token files share: checksums, and JSON that is checked when it is read. No MindSpore."""

"""The command line: commands, flags, help."""

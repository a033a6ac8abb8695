"""What a configuration may not say, and what the user should know of it."""

"""The keys of a configuration file: a pydantic model for each section."""

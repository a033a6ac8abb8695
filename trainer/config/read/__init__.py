"""Reads a configuration from a YAML file and flags, and writes it as YAML."""

"""From a YAML file and flags to a configuration, and back to YAML."""

"""Rules that a configuration must satisfy, and notes about settings whose effect may surprise."""

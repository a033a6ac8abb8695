"""The configuration: reads YAML and flags into one checked tree of values. Never imports MindSpore."""

from trainer.config.checks.rules import preflight
from trainer.config.read.dump import dump_config
from trainer.config.read.json_schema import json_schema
from trainer.config.read.loader import config_notes, load_config, parse_config
from trainer.config.read.overrides import Override, is_boolean
from trainer.config.read.relocate import is_top_level
from trainer.config.read.resolve import in_sections, key_names, sections_with
from trainer.config.schema.root import Config

__all__ = [
    "Config",
    "Override",
    "preflight",
    "config_notes",
    "dump_config",
    "in_sections",
    "is_boolean",
    "is_top_level",
    "json_schema",
    "key_names",
    "load_config",
    "parse_config",
    "sections_with",
]

"""What a run shows and writes down: console, log file, metrics.jsonl, report.png and the closing summary."""

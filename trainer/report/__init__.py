"""What a run folder tells: its files read into one value, report.html and report.png. Never imports MindSpore."""

"""What a run will do, computed without MindSpore."""

"""MindSpore's semi-automatic parallel mode: one graph that MindSpore shards over ranks."""

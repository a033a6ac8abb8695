"""Learning rate schedules (pure Python) and the optimizers (MindSpore); import the file you need."""

"""What Ascend would run, found out on a machine without one: `plan --audit ascend`."""

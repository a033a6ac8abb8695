"""`smoke`: a training file made small enough for this machine, trained, saved, resumed and judged."""

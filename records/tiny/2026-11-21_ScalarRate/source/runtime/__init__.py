"""What a run needs around it and that knows nothing of GPTs: log, clock, machine, flags, progress, signals."""

"""What a run needs around it: settings, machine, compiler, clock, log, checkpoints, resume."""

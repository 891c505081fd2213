"""Reading run logs, judging claims, and writing records. Imports no torch."""

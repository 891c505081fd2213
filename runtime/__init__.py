"""What a run needs around it: its log and its clock. Nothing here knows the model."""

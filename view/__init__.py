"""A local page that shows the runs of folders as they grow. Imports no torch."""

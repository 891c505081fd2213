"""Token shards: the file format, the loader, and where tokens come from."""

"""Token shards: their format, the loader, and where tokens come from."""

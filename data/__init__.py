"""Token shards: their format, the loader, and the programs that make them."""

"""The daemon on each device: lease, telemetry, links, shard store, worker supervision. Loads neither torch nor numpy."""

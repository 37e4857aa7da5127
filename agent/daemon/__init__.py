"""The daemon on each device: leases, telemetry, links, shard store, workers. Imports neither torch nor numpy."""

"""The worker process of one rank of a plan, and the profiler processes."""

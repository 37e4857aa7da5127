"""Plans, profiles and shard geometry, shared by the coordinator and the agents. Pure: no input or output."""

"""Plans, profiles and geometry shared by the coordinator and the agents. Pure."""

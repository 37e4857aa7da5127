"""What would run where: planners, costs and the simulator. Pure."""

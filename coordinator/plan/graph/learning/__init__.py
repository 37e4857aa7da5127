"""What serving teaches the planners of graphs: calibrated times, and plans that are tried on the devices. Pure."""

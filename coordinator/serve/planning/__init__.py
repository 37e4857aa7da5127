"""Planning in child processes: the first plan, better ones, and those for the loss of each device."""

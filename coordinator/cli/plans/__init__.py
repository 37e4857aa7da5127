"""`hearth plan`: profile, plan, save and show, for both kinds of model."""

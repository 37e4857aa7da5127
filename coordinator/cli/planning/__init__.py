"""`hearth plan`: where a profile comes from, the plan for it, and what is saved and shown; the kinds of model side by side."""

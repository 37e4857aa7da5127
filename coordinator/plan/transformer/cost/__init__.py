"""Predicted time and memory of transformer plans."""

"""Devices, links, plans and graphs as text, tables and pictures for people."""

"""Doppler (arXiv 2505.23131): dual policies that learn the placement of one operator graph, with torch, as published.

`home` trains a smaller policy for all graphs and homes.
"""

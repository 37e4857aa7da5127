"""Doppler as published (arXiv 2505.23131): dual policies that learn the placement of one operator graph, with torch."""

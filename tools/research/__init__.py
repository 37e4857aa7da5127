"""Experiments that repeat the tables of the papers: Doppler, Placeto, Moirai, partition and placement, GETF, m-SCT."""

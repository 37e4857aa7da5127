"""Layouts of weight matrices and the kernels that multiply them: one file for each library or format.

A layout is a class with `load`, `read`, `rows`, `columns`, `matmul` and `memory`; `kernels` names the ways in which it can
compute a product, and `product` computes with one of them. `agent.worker.transformer.matrices` lists the layouts.
"""

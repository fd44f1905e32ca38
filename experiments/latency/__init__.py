"""Measuring attention kernels beside one another: shapes, contenders, timing, rows, figures."""

"""Arithmetic whose results have the same bits in any world, what each step had, and the rows of what was tried."""

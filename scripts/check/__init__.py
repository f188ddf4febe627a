"""Checks of the package as a whole, where its tests cannot be run or do not reach."""

"""For tools that still run setup.py: everything stands in pyproject.toml."""

from setuptools import setup

setup()

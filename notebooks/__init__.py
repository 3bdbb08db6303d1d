"""Notebooks, numbered by stage; build.py makes them."""

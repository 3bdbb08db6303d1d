"""Defines no key_range, because CS336 has no such function; a stand-in replaces it."""

key_range = None

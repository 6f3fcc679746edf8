"""Helpers that tests of several packages share; typed like the product."""

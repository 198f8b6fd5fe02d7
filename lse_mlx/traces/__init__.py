"""Traces of real generations: recorded from the decode cycle, and replayed through it."""

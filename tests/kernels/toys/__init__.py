"""Implementations of attention with faults, for tests of the lab: used by their modules' names."""

"""What an operator or a researcher sees of an engine: metrics, iteration log, timeline, profiles.

Observers hang on `engine.core.observers`; they decide nothing.
"""

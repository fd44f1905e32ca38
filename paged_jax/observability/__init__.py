"""What an operator or a researcher sees of an engine: metrics, iteration log, timeline, profiles.

All of it hangs on `engine.core.observers`; nothing here decides anything.
"""

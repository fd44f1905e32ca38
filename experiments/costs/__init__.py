"""What parts of the engine cost."""

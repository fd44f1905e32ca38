"""The engine's loop over a device that computes nothing."""

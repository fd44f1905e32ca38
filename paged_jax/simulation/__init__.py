"""The same loop, scheduler and memory managers on a virtual clock: no device, no jax."""

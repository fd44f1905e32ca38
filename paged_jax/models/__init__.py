"""Llama-family decoders: their configuration, parameters, rotary frequencies and computation."""

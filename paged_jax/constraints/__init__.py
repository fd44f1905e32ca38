"""Which tokens may come next in a sequence, decided on the host from the tokens so far."""

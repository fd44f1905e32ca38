"""Who owns which KV slot: host state only, sequences known by their ids alone."""

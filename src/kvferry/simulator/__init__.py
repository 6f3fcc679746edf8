"""A deterministic simulator: production cores, hosts and agent loops on virtual time, one seed a history."""

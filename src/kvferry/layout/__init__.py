"""KV geometry: what a rank's cache looks like and how one cache's bytes map to another's."""

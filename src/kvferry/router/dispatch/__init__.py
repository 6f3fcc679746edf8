"""How a prompt is served: by push, by pull, by the decode engine alone, and again when a leg fails."""

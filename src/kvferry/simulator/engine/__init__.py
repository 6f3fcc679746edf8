"""One engine as vLLM's behave, around the production host and agents. Begin with `engine`."""

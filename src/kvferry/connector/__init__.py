"""The vLLM connector: turns the engine's hooks into commands for the agent, and its results into answers."""

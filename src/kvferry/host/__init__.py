"""What an engine decides about its transfers, on its scheduler and on its ranks, free of any engine's types.

The vLLM connector and the simulator are its two users: each translates between its engine and these classes.
"""

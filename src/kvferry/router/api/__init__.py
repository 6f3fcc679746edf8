"""What clients and engines say to each other: bodies, events, and what prompts have in common."""

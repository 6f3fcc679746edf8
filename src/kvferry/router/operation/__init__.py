"""What an operator sees and sets."""

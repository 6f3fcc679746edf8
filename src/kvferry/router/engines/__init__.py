"""The engines that the router knows: who they are, how they are, and the choice among them."""

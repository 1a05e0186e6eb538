"""How the cost of a private step grows with positions, examples and width."""

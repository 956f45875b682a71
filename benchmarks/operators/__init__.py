"""One file per operator: its shapes, its contestants, and what makes them agree."""
